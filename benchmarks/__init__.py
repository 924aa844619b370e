"""Measured comparisons behind `python jobs/benchmark.py`: the peer is part of the benchmark, both run in one go.

A speed is a ratio to something that a reader can run too, beside the limit it must keep. No test asserts a figure,
because a busy machine is no error in the code.
"""
