"""Measured comparisons behind `python jobs/benchmark.py`: the peer is part of the benchmark, both run in one go.

Why it exists: a speed is a ratio to something that a reader can run too, beside the limit it must keep.
What it does not know: tests; nothing here is asserted in one, since a busy machine is no error in the code.
"""
