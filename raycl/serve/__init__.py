"""Answering with what was learned: a snapshot of the bank and its backbone, nothing else.

Does not depend on methods or training.
"""
