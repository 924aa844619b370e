"""Scores of texts, the accuracy matrix of scores, and AP, F.Ra and BWT of the matrix.

A number is only comparable if its rule is written down once and tested against the published ones. Does not depend on
models, methods or the way in which results are shown.
"""
