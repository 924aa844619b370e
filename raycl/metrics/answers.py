"""Answers with their references, as every metric gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

References = Sequence[Sequence[str]]
Labels = Sequence[str] | None


class Answers(NamedTuple):
    """What a metric compares.

    Attributes:
        predictions: one per example; None: it counts as wrong (off-task).
        references: per example one or more accepted texts.
        labels: the task's closed label set, None for free text.
        sources: the input texts; empty unless the metric needs them.
    """

    predictions: Sequence[str | None]
    references: References
    labels: Labels = None
    sources: Sequence[str] = ()

    def rows(self) -> Iterator[Answers]:
        """Yield each example by itself, without its source."""
        for prediction, accepted in self.pairs():
            yield Answers([prediction], [accepted], self.labels)

    def pairs(self) -> Iterator[tuple[str | None, Sequence[str]]]:
        """Yield each prediction with its references."""
        return zip(self.predictions, self.references, strict=True)


Metric = Callable[[Answers], tuple[float, dict[str, float]]]
"""Answers -> value 0-100, extra numbers."""


def mean_best(match: Callable[[str, str], float]) -> Metric:
    """Return a metric out of a rule for one prediction and one reference: best reference, mean over examples, times
    100."""

    def metric(answers: Answers) -> tuple[float, dict[str, float]]:
        best = (
            0.0 if prediction is None else max(match(prediction, reference) for reference in accepted)
            for prediction, accepted in answers.pairs()
        )
        return 100.0 * sum(best) / len(answers.predictions), {}

    return metric
