"""Snapshots of an endpoint: loaded, activated, evaluated by the gate."""
