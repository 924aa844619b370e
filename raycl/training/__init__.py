"""Training a stream: engines, the step, checkpoints, the journal, the loop.

What it does not know: Ray.
"""
