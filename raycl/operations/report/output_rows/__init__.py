"""Rows of weights that tasks share: those that training updated, and those with large outputs in a finished model."""
