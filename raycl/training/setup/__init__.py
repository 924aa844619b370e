"""A run before it trains: its whole config, and the checks that need no worker."""
