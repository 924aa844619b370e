"""Answers without a server: a model in this process, predictions for files, scores of a snapshot."""
