"""One page about finished runs: every table and picture in a file of its own that needs no network and no server."""
