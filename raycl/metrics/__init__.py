"""Scores and what is made of them: texts to a score, scores to the accuracy matrix, the matrix to AP, F.Ra, BWT.

Why it exists: a number is only comparable if its rule is written down once and tested against the published ones.
What it does not know: models, methods, how predictions were made, how results are shown.
"""
