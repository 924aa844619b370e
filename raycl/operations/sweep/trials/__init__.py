"""Trials of a sweep: one run each, shared prefixes, single-task runs."""
