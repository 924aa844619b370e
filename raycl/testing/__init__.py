"""Tiny models for tests of methods, here and in other packages."""
