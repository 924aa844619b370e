"""Commands about banks: look into one, serve it, answer files from it."""
