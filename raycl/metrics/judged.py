"""Answers judged in pairs: wins, ties and losses of a trained model against the untrained one, and their delta.

TRACE (Wang et al. 2023, arXiv 2310.06762, section 3.3) measures instruction following and safety as the mean of
`R_t - R_0` over the prompts, and shows shares of wins, ties and losses. A judge compares the two answers to a prompt in
both orders. How disagreeing verdicts are merged is not published; here they are a tie, as in MT-Bench (Zheng et al.
2023, arXiv 2306.05685, section 3.4). `R` of an answer is 1 for a win, 1/2 for a tie and 0 for a loss, so that the delta
is the share of wins minus that of losses, in points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raycl.metrics.per_example import interval

Verdict = Literal["before", "after", "tie"]
"""Whose answer a judge prefers."""

Outcome = Literal["win", "tie", "loss"]
"""What the verdicts on a prompt are to the trained model."""

_POINTS: dict[Outcome, float] = {"win": 100.0, "tie": 50.0, "loss": 0.0}


def outcome(verdicts: Sequence[Verdict]) -> Outcome:
    """Return the outcome of a prompt: a win or a loss where all verdicts agree on it, else a tie."""
    if len(set(verdicts)) > 1:
        return "tie"
    outcomes: dict[Verdict, Outcome] = {"after": "win", "before": "loss", "tie": "tie"}
    return outcomes[verdicts[0]]


@dataclass(frozen=True)
class JudgedScore:
    """The outcomes of a set of prompts.

    Attributes:
        prompts: their number.
        win, tie, loss: percent of them.
        delta: mean of `R_t - R_0` in points, -100 to 100.
        low, high: limits of its 95 % interval (`raycl.metrics.per_example.interval`).
    """

    prompts: int
    win: float
    tie: float
    loss: float
    delta: float
    low: float
    high: float

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> JudgedScore:
        """Return the score of at least one outcome."""
        counts, count = Counter(outcomes), len(outcomes)
        win, tie, loss = (100.0 * counts[name] / count for name in ("win", "tie", "loss"))
        low, high = interval([_POINTS[name] for name in outcomes])
        return JudgedScore(count, win, tie, loss, win - loss, 2 * low - 100.0, 2 * high - 100.0)
