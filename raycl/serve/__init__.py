"""Answering with what was learned: a snapshot of the bank and its backbone, nothing else.

What it does not know: methods, training.
"""
