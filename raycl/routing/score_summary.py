"""What runs record of out-of-distribution scores, and the threshold among them; reports read it without torch."""

import math

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Shares of a task's dev texts whose scores lie below the recorded ones."""


def texts_below(kept: int, false_alarms: float) -> int | None:
    """Return how many of the kept texts lie below or at the threshold; None: they are too few for so small a share.

    A new text of the tasks is above it with at most this probability: the kept text there has this share of all kept
    texts and the new one behind it.
    """
    place = math.ceil((kept + 1) * (1 - false_alarms) - 1e-9)
    return place if place <= kept else None
