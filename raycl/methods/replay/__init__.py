"""Replay: rows and pseudo-samples of earlier tasks, where they come from, and how they are trained on again."""
