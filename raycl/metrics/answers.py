"""Answers with their references, as every metric gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

References = Sequence[Sequence[str]]
Labels = Sequence[str] | None


class Answers(NamedTuple):
    """The predictions and references that a metric compares.

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


Compute = Callable[[Answers], tuple[float, dict[str, float]]]
"""Answers -> value 0-100, extra numbers."""


@dataclass(frozen=True)
class Metric:
    """A metric: the function from answers to a score, and its requirements.

    Attributes:
        overlap: it measures overlapping text, to which the off-task rule does not apply.
        mean_of_rows: it is the mean of what it gives for each row alone, so that a score of a sample has an interval.
        needs_sources: it compares with the input texts.
        reads_prompts: the input texts that it compares with are whole prompts, the task's instruction included.
        library: the optional module that it needs. install: the extra that installs it.
    """

    compute: Compute
    overlap: bool = False
    mean_of_rows: bool = True
    needs_sources: bool = False
    reads_prompts: bool = False
    library: str = ""
    install: str = ""


def mean_best(match: Callable[[str, str], float]) -> Compute:
    """Return a metric from a rule for a prediction and a reference: mean over examples of the best, times 100."""

    def metric(answers: Answers) -> tuple[float, dict[str, float]]:
        best = (
            0.0 if prediction is None else max(match(prediction, reference) for reference in accepted)
            for prediction, accepted in answers.pairs()
        )
        return 100.0 * sum(best) / len(answers.predictions), {}

    return metric
