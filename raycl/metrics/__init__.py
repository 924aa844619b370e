"""Scores and what is made of them: texts to a score, scores to the accuracy matrix, the matrix to AP, F.Ra, BWT.

A number is only comparable if its rule is written down once and tested against the published ones. Does not depend on
models, methods or the way in which results are shown.
"""
