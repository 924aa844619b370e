"""Optimizers: one file each, found by name in `registry.OPTIMIZERS`."""
