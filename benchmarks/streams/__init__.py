"""Benchmarks of training on streams."""
