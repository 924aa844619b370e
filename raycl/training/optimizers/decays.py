"""Learning-rate schedules after their warm-up, by the formulas and names of Hugging Face.

They are written here because `transformers.optimization` imports PEFT, and that bitsandbytes: a fifth of the time from
a command to its first step. A test compares every rate with that of `transformers.get_scheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

POLYNOMIAL_END = 1e-7
"""The learning rate at which "polynomial" ends."""

Decay = Callable[[int, int, float], float]
"""`(step, steps, rate)` -> factor of the learning rate. Both counts begin after warm-up; `rate` is the highest one."""


def _constant(step: int, steps: int, rate: float) -> float:
    return 1.0


def _linear(step: int, steps: int, rate: float) -> float:
    return max(0.0, (steps - step) / max(1, steps))


def _cosine(step: int, steps: int, rate: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step / max(1, steps)))))


def _polynomial(step: int, steps: int, rate: float) -> float:
    """Return the factor of a polynomial of degree 1."""
    left = max(0.0, 1.0 - step / max(1, steps))
    return ((rate - POLYNOMIAL_END) * left + POLYNOMIAL_END) / rate


DECAYS: dict[str, Decay] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine,  # Hugging Face's default is one cycle: its restart would be the end
    "polynomial": _polynomial,
}
"""Name of `train.lr_scheduler` -> decay, for those that need no further arguments."""
