"""Pages for a browser: plain files without a build step, their content security policy, and the address they are at."""
