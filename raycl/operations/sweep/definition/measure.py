"""The metrics of a trial: AP, F.Ra, a task's score, or an expression of them, after each task."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raycl.errors import ConfigError
from raycl.metrics.matrix import AccuracyMatrix, summary
from raycl.operations.sweep.definition.expressions import Expression, parse
from raycl.types import Score

NAMES = ("ap", "f_ra", "fwt", "bwt", "bwt_m", "average_accuracy")
"""The numbers of a run that a metric may name; formulas in `raycl.metrics.matrix`."""

FORGETTING = ("f_ra", "bwt", "bwt_m")
"""Numbers that are 0 after the first task, when nothing can be forgotten."""


def read_metric(text: str) -> Expression:
    """Parse a metric such as `ap`, `ap - 0.5 * f_ra` or `task("agnews")`.

    Raises:
        ConfigError: it is not an expression, or names what is no number of a run.
    """
    expression = parse(text, functions=("task",))
    unknown = [name for name in expression.names if name not in NAMES]
    if unknown:
        raise ConfigError(f"metric '{text}' names '{unknown[0]}': expected {', '.join(NAMES)} or task(\"its name\")")
    return expression


def read_matrix(tasks: Sequence[str], phases: Sequence[str], records: Sequence[Mapping[str, Any]]) -> AccuracyMatrix:
    """Return the matrix of the phases in the journal records; rows for these alone, columns for tasks seen so far."""
    done = len(records)
    sequence = len(tasks) == len(phases)
    seen = tuple(tasks[:done]) if sequence else tuple(tasks)
    matrix = AccuracyMatrix(seen, tuple(phases[:done]))
    for i, record in enumerate(records):
        for j, task in enumerate(seen):
            if task in record["row"]:
                matrix.set(i, j, Score(**record["row"][task]))
    return matrix


def measured(
    metrics: Sequence[Expression],
    tasks: Sequence[str],
    phases: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    singles: Mapping[str, float] | None = None,
) -> list[float | None]:
    """Return each metric after the phases of `records` (at least one).

    None where a number that it names is undefined, and where it has no value for these numbers (`ap / f_ra` where
    nothing is forgotten).
    """
    matrix = read_matrix(tasks, phases, records)
    numbers: dict[str, Any] = dict(summary(matrix, singles))
    if len(records) == 1:
        numbers |= {name: 0.0 for name in FORGETTING if numbers[name] is None}
    scores = {task: cell["value"] for task, cell in records[-1]["row"].items() if task in matrix.tasks}
    values: list[float | None] = []
    for metric in metrics:
        undefined = any(numbers[name] is None for name in metric.names)
        unseen = any(name == "task" and task not in scores for name, task in metric.calls)
        values.append(None if undefined or unseen else _value(metric, numbers, scores))
    return values


def _value(metric: Expression, numbers: Mapping[str, Any], scores: Mapping[str, float]) -> float | None:
    try:
        value = float(metric.value(numbers.__getitem__, {"task": scores.__getitem__}))
    except (ConfigError, TypeError, ValueError):  # another trial's numbers may have one
        return None
    return value if math.isfinite(value) else None
