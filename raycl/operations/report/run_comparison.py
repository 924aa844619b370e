"""Runs that belong together: the same settings under several seeds become one line with mean and spread.

A comparison that averages runs with different settings, or hides that they differ, is worthless. Runs are averaged only
if their configs are equal apart from the seed and `NOT_COMPARED`; lines that share method, stream and backbone are
labelled with the keys in which they differ. Cells of a setting's accuracy matrix are means over such runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from raycl.config import Tree, flatten
from raycl.data.sources.table_cells import spreadsheet
from raycl.metrics.run_results import (
    FOLDER,
    INSTRUCTION,
    METRICS,
    OF_TYPE,
    UNTRAINED,
    BareKind,
    averages_of,
    backbone_of,
    general_of,
    method_of,
    metric_of,
    other_row_of,
    shots_of,
    stream_of,
    tasks_of,
    title_of,
    unseen_mean,
    unseen_types,
    untrained_of,
    values_of,
)

NOT_COMPARED = frozenset(
    {
        *("seed", "launch", "tracking", "output", "checkpoint"),
        *("bank.dir", "bank.branch", "bank.publish", "bank.copies", "bank.sample_days", "bank.allow_storage"),
        *("eval.singles", "eval.save_predictions", "eval.other_row"),
    }
)
"""Config sections and keys that may differ among runs of one line: they do not change what is learned."""

UNSEEN = "unseen"

OPTIONAL = {
    "accuracy": "accuracy",
    "accuracy_first_two": "of the first two",
    "accuracy_last_two": "of the last two",
    UNSEEN: "unseen",
    "ap_chosen": "AP, text alone",
    "ap_given": "AP, with instruction",
    "general_before": "general before",
    "general_after": "general after",
    "general_delta": "delta",
    "general_unknown": "unknown",
}
"""Means that not every run has -> column title: of accuracies beside F1 scores, over tasks that were never trained, of
the last row under the other `eval.instruction`, and of `general_of`. They are columns only where some run has them."""

COSTS = ("wall_s", "tokens_per_s", "train_s", "prepare_s", "trained_parameters", "peak_memory_mb", "kept_mb_per_task")
"""Costs of a run: seconds, tokens a second, seconds inside training steps and before them, in which keys are made,
parameters of the phase that trains most, MiB of the largest worker, and MiB that are kept for each task."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (None below two values) of the same number over seeds."""

    mean: float
    std: float | None

    @staticmethod
    def over(numbers: Sequence[float | None]) -> Spread | None:
        """Return None unless every run has the number, since a mean over some seeds only would mislead."""
        known = [number for number in numbers if number is not None]
        if not known or len(known) < len(numbers):
            return None
        return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


@dataclass(frozen=True)
class Line:
    """One line of a comparison.

    Attributes:
        method: name with modifiers.
        settings: `key=value` where it differs from other lines of the same method, stream and backbone.
        runs: number of runs in the means, one for each seed.
        numbers: `ap`, `f_ra`, `fwt`, `bwt`, those in `OPTIONAL`, `unseen_<type>` for the types of tasks that were never
            trained (points), `COSTS`.
        printed: numbers that a paper printed, with their source and marks, as `Published.of`; {}: none.
    """

    method: str
    settings: str
    stream: str
    backbone: str
    runs: int
    numbers: dict[str, Spread | None]
    printed: Tree = field(default_factory=dict)

    @property
    def published(self) -> Mapping[str, float]:
        """Numbers that a paper printed."""
        return dict(self.printed.get("numbers", {}))

    @property
    def source(self) -> str:
        """Paper and table of these numbers."""
        return str(self.printed.get("source", ""))

    @property
    def contradicted(self) -> Mapping[str, str]:
        """Those of these numbers that something contradicts -> what it is."""
        return dict(self.printed.get("contradicted", {}))

    @property
    def title(self) -> str:
        """The method, with its settings where it has some."""
        return f"{self.method} ({self.settings})" if self.settings else self.method


def compare(results: Sequence[Tree]) -> list[Line]:
    """Return a line per setting, by stream and backbone, in order of first appearance within them.

    Before those of a stream and backbone stands the untrained backbone, where a run evaluated it, also with examples.
    """
    lines: list[Line] = []
    bare = _bare(results)
    for settings, group in grouped(results):
        for kind in get_args(BareKind):
            scores = [scores for (*key, _), scores in bare.items() if key == [kind, *_bench(group[0])]]
            if scores and (line := _bare_line(scores, kind)) not in lines:
                lines.append(line)
        lines.append(_line(group, settings))
    return lines


def points_of(lines: Sequence[Line]) -> dict[str, str]:
    """Return numbers in points that these lines show -> column title."""
    shown = {name: title for name, title in OPTIONAL.items() if any(line.numbers[name] for line in lines)}
    types = [name for line in lines for name in line.numbers if name.startswith(OF_TYPE)]
    return METRICS | shown | {name: name.removeprefix(OF_TYPE) for name in dict.fromkeys(types)}


def has_published(lines: Sequence[Line], name: str) -> bool:
    """Return whether a paper printed this number for some line."""
    return any(name in line.published for line in lines)


def grouped(results: Sequence[Tree]) -> list[tuple[str, list[Tree]]]:
    """Return the runs of each line in order, with `key=value` where lines of the same title differ."""
    groups: dict[str, list[Tree]] = {}
    for result in results:
        groups.setdefault(json.dumps([_title(result), _compared(result)], sort_keys=True), []).append(result)
    members = sorted(groups.values(), key=lambda group: (stream_of(group[0]), backbone_of(group[0])))
    return [(_differing(group[0], [other[0] for other in members]), group) for group in members]


def labels(results: Sequence[Tree]) -> list[str]:
    """Return the title of each run, with `key=value` where runs of the same method, stream and backbone differ."""
    settings = [_differing(result, results) for result in results]
    return [
        f"{title_of(result)} ({keys})" if keys else title_of(result)
        for result, keys in zip(results, settings, strict=True)
    ]


VERDICT_COLUMNS = {
    "against": "second",
    "difference": "difference",
    "low": "low",
    "high": "high",
    "p": "p",
    "p_holm": "p_holm",
    "verdict": "verdict",
    "paired_seeds": "seeds",
    "paired_over": "paired_over",
    "seeds_needed": "seeds_needed",
}
"""Column of a verdict behind its measure (`ap_against`) -> key of its tree."""


def to_csv(results: Sequence[Tree], verdicts: Sequence[Tree] = ()) -> str:
    """Return the comparison as CSV: means and standard deviations in full precision, empty where undefined.

    Args:
        verdicts: trees of verdicts on the methods, for columns of their own.
    """
    lines = compare(results)
    names = [*points_of(lines), *COSTS]
    spreads = [title for name in names for title in (name, f"{name}_std")]
    known = [name for name in names if has_published(lines, name)]
    given = [f"{name}_published" for name in known] + (["published"] if known else [])
    measures = list(dict.fromkeys(verdict["measure"] for verdict in verdicts))
    said = {(verdict["measure"], verdict["where"], verdict["first"]): verdict for verdict in verdicts}
    given += [f"{measure}_{column}" for measure in measures for column in VERDICT_COLUMNS]
    rows: list[list[Any]] = [["method", "settings", "stream", "backbone", "runs", *spreads, *given]]
    for line in lines:
        cells = [cell for name in names for cell in _cells(line.numbers.get(name))]
        printed = [line.published.get(name) for name in known] + ([line.source] if known else [])
        for measure in measures:
            verdict = said.get((measure, f"{line.stream}, {line.backbone}", line.title), {})
            printed += [verdict.get(key) for key in VERDICT_COLUMNS.values()]
        rows.append([line.method, line.settings, line.stream, line.backbone, line.runs, *cells, *printed])
    return spreadsheet(rows)


def runs_to_csv(results: Sequence[Tree]) -> str:
    """Return CSV with a line for each run: its folder's name, its seed, its numbers in full precision and the last
    score of each task; and one for each seed's scores before any training.

    The scores stand in columns `score_<task>`; cells are empty where a run has not the number or the task.
    """
    bare = _bare(results)
    bare_lines = [_bare_line([scores], kind) for (kind, *_), scores in bare.items()]
    lines = [_line([result], "") for result in results] + bare_lines
    names_of = [_folder_name(result) for result in results]
    names_of += [f"{line.method}-s{seed}" for line, (*_, seed) in zip(bare_lines, bare, strict=True)]
    results = [*results, *bare.values()]
    names = [*points_of(lines), *COSTS]
    ends = [dict(zip(tasks_of(result), values_of(result)[-1], strict=True)) for result in results]
    tasks = list(dict.fromkeys(task for end in ends for task in end))
    scores = [f"score_{task}" for task in tasks]
    rows: list[list[Any]] = [["run", "seed", "method", "stream", "backbone", *names, *scores]]
    for run, result, line, end in zip(names_of, results, lines, ends, strict=True):
        numbers = [line.numbers.get(name) for name in names]
        title = [run, result["config"].get("seed"), line.method, line.stream, line.backbone]
        rows.append([*title, *(number and number.mean for number in numbers), *(end.get(task) for task in tasks)])
    return spreadsheet(rows)


def _folder_name(result: Tree) -> str:
    named = (result["config"].get("output") or {}).get("name")
    return str(named or result.get(FOLDER, "").rstrip("/").rpartition("/")[2])


def _bare(results: Sequence[Tree]) -> dict[tuple[Any, ...], Tree]:
    """Return kind, `_bench` and seed -> scores before any training as a result."""
    found: dict[tuple[Any, ...], Tree] = {}
    for kind in get_args(BareKind):
        for result in results:
            if (scores := untrained_of(result, kind)) is not None:
                found.setdefault((kind, *_bench(result), result["config"].get("seed")), scores)
    return found


def _bench(result: Tree) -> tuple[str, ...]:
    """Return what scores before any training depend on, but for the seed: stream, backbone and tasks."""
    return (*_title(result)[1:], *tasks_of(result))


def _bare_line(scores: Sequence[Tree], kind: BareKind) -> Line:
    """Return the line of a backbone before any training, over the seeds that evaluated it."""
    name = UNTRAINED if kind == UNTRAINED else shots_of(scores[0])
    return replace(_line(scores, ""), method=name, printed={})


def _cells(spread: Spread | None) -> list[float | None]:
    return [None, None] if spread is None else [spread.mean, spread.std]


def _line(group: Sequence[Tree], settings: str) -> Line:
    first = group[0]
    numbers = {name: Spread.over([metric_of(result, name) for result in group]) for name in METRICS}
    optional = [_optional(result) for result in group]
    numbers |= {name: Spread.over([scores[name] for scores in optional]) for name in OPTIONAL}
    types = [unseen_types(result) for result in group]
    numbers |= {f"{OF_TYPE}{name}": Spread.over([scores.get(name) for scores in types]) for name in types[0]}
    numbers |= {name: Spread.over([result.get(name) for result in group]) for name in COSTS}
    title = method_of(first), settings, stream_of(first), backbone_of(first)
    return Line(*title, len(group), numbers, first.get("published") or {})


def _optional(result: Tree) -> dict[str, float | None]:
    accuracy, other = averages_of(result, "accuracy"), other_row_of(result)
    return {
        "accuracy": accuracy.get("all"),
        "accuracy_first_two": accuracy.get("first_two"),
        "accuracy_last_two": accuracy.get("last_two"),
        UNSEEN: unseen_mean(result),
        **general_of(result),
        **{f"ap_{kind}": other[2] if other and other[0] == kind else None for kind in INSTRUCTION},
    }


def _compared(result: Tree) -> Tree:
    fused = {key: value for key, value in (result.get("fused") or {}).items() if key not in ("snapshot", "seed")}
    leaves = flatten(result["config"] | ({"fused": fused} if fused else {}))
    return {key: leaf for key, leaf in leaves.items() if not {key, key.partition(".")[0]} & NOT_COMPARED}


def _title(result: Tree) -> tuple[str, str, str]:
    return method_of(result), stream_of(result), backbone_of(result)


def _differing(result: Tree, others: Sequence[Tree]) -> str:
    own = _compared(result)
    alike = [_compared(other) for other in others if _title(other) == _title(result)]
    keys = sorted({key for other in alike for key in own if key not in other or own[key] != other[key]})
    return " ".join(f"{key}={'null' if own[key] is None else own[key]}" for key in keys)


@dataclass(frozen=True)
class SeedMatrix:
    """The accuracy matrix of a setting.

    Attributes:
        results: result trees of its runs. settings: `key=value` where it differs from others of the same title.
        cells: a row for each phase, a column for each task; None where not every run has a score.
        numbers: `METRICS` by name.
    """

    results: list[Tree]
    settings: str
    cells: list[list[Spread | None]]
    numbers: dict[str, Spread | None]

    @staticmethod
    def over(results: list[Tree], settings: str = "") -> SeedMatrix:
        """Return the matrix of runs with the same phases and tasks."""
        rows = zip(*map(values_of, results), strict=True)
        cells = [[Spread.over(scores) for scores in zip(*row, strict=True)] for row in rows]
        numbers = {name: Spread.over([metric_of(result, name) for result in results]) for name in METRICS}
        return SeedMatrix(results, settings, cells, numbers)

    @property
    def title(self) -> str:
        """A line that identifies it: the method, where others share it the settings that differ, and the seeds."""
        first, *rest = self.results
        method = method_of(first, self.settings)
        if not rest:
            return method + title_of(first).removeprefix(method_of(first))
        seeds = ", ".join(str(result["config"].get("seed")) for result in self.results)
        return f"{method} on {stream_of(first)}, {backbone_of(first)}, seeds {seeds}"

    @property
    def tasks(self) -> list[str]:
        """Names of the columns."""
        return tasks_of(self.results[0])

    @property
    def phases(self) -> list[str]:
        """Names of the rows."""
        return [str(phase) for phase in self.results[0]["phases"]]


def seed_matrices(results: Sequence[Tree]) -> list[SeedMatrix]:
    """Return a matrix for each setting, in the order of a comparison's lines.

    Runs of one setting whose tasks came in another order, or which have more of them, have matrices of their own.
    """
    matrices = []
    for settings, group in grouped(results):
        alike: dict[tuple[str, ...], list[Tree]] = {}
        for result in group:
            alike.setdefault((*map(str, result["phases"]), "", *tasks_of(result)), []).append(result)
        matrices += [SeedMatrix.over(members, settings) for members in alike.values()]
    return matrices


def matrices_to_csv(matrices: Sequence[SeedMatrix]) -> str:
    """Return CSV with a line for each cell that has a score: mean and standard deviation in full precision."""
    rows: list[list[Any]] = [["method", "settings", "stream", "backbone", "runs", "after", "task", "mean", "std"]]
    for matrix in matrices:
        first = matrix.results[0]
        head = [method_of(first), matrix.settings, stream_of(first), backbone_of(first), len(matrix.results)]
        for phase, row in zip(matrix.phases, matrix.cells, strict=True):
            for task, cell in zip(matrix.tasks, row, strict=True):
                if cell is not None:
                    rows.append([*head, phase, task, cell.mean, cell.std])
    return spreadsheet(rows)
