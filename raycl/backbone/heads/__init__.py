"""Heads of an encoder-only model: scores over labels, and guesses of hidden words."""
