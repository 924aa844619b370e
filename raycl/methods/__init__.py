"""Continual-learning methods: one file each, found by name in `registry.METHODS`."""
