"""Optimizers, found by name in `registry.OPTIMIZERS`, and the parameters that they update."""
