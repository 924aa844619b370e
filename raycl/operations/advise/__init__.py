"""Advice on which method fits a case, by the measured comparisons and by what methods declare."""
