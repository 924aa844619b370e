"""Snapshots of an endpoint: read from the bank, loaded, activated."""
