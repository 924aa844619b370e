"""Benchmarks of the endpoint."""
