"""Large outputs of finished models for the texts of each task (`raycl probe`), compared: does MIGU keep tasks apart?

The paper's figures 5, 15 and 16 show "the overlapping ratio of updated parameters (large magnitudes) positions by using
100 samples per task", with MIGU and without. Runs that differ in their seed alone are one column with mean and spread.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from raycl.config import Tree
from raycl.data.sources.table_cells import spreadsheet
from raycl.errors import RunError
from raycl.metrics.run_results import backbone_of, method_of, stream_of
from raycl.operations.report.phase_summaries import TaskRows, unpacked_rows
from raycl.operations.report.run_comparison import Spread, grouped
from raycl.operations.report.tables import points
from raycl.text_tables import grid, render

UNTRAINED, ALL = "untrained", "all layers"


@dataclass(frozen=True)
class ProbedModel:
    """A column: the untrained backbone, or the runs of one setting.

    Attributes:
        title: method with modifiers, and settings where they differ.
        runs: large outputs of each run's model.
    """

    title: str
    runs: list[TaskRows]

    @property
    def tasks(self) -> list[str]:
        return self.runs[0].tasks

    def overlap(self, paths: Sequence[str]) -> list[list[float]]:
        """Return tasks by tasks in percent, mean over layers and runs; see `TaskRows.overlap`."""
        shares: list[list[float]] = np.mean([run.overlap(paths) for run in self.runs], axis=0).tolist()
        return shares

    def mean_overlap(self, paths: Sequence[str]) -> Spread | None:
        """Return the mean over pairs of tasks, over runs."""
        return Spread.over([run.mean_overlap(paths) for run in self.runs])


@dataclass(frozen=True)
class Probes:
    """Models that were measured with the same texts and settings.

    Attributes:
        title: stream and backbone. rows: test rows of each task. chance: overlap by chance, in percent.
        kinds: kind of layer -> paths; the last one, `ALL`, has all of them.
        models: the untrained backbone first.
    """

    title: str
    rows: int
    chance: float
    kinds: dict[str, list[str]]
    models: list[ProbedModel]


def probes_of(results: Sequence[Tree], measured: Sequence[Mapping[str, Tree]], layer: str = "") -> list[Probes]:
    """Return a probe for each stream, backbone and measurement.

    Args:
        measured: `probe.json` of each run. layer: regular expression for the end of a path; "": every layer.

    Raises:
        RunError: no layer ends so.
    """
    sets: dict[tuple[object, ...], list[int]] = {}
    for number, (result, measurement) in enumerate(zip(results, measured, strict=True)):
        settings = measurement["settings"]
        same = (stream_of(result), backbone_of(result), settings["rows"], settings["threshold"], *measurement["tasks"])
        sets.setdefault((*same, *measurement["models"]["trained"]), []).append(number)
    return [_probes([results[n] for n in numbers], [measured[n] for n in numbers], layer) for numbers in sets.values()]


def _probes(results: Sequence[Tree], measured: Sequence[Mapping[str, Tree]], layer: str) -> Probes:
    by_run = {id(result): measurement for result, measurement in zip(results, measured, strict=True)}
    first = _rows_of(measured[0], UNTRAINED)
    kinds = {kind: [path for path in paths if re.search(f"({layer})$", path)] for kind, paths in first.kinds.items()}
    kinds = {kind: paths for kind, paths in kinds.items() if paths}
    if not kinds:
        raise RunError(f"no measured layer ends with '{layer}': expected the end of one of {', '.join(first.kinds)}")
    bare = {json.dumps(item["models"][UNTRAINED]): item for item in measured}  # seeds with the same test rows: one
    models = [ProbedModel(UNTRAINED, [_rows_of(item, UNTRAINED) for item in bare.values()])]
    for settings, group in grouped(results):
        short = re.sub(r"[\w.]+\.(?=\w+=)", "", settings)  # the last part of each key: columns have little room
        models.append(
            ProbedModel(method_of(group[0], short), [_rows_of(by_run[id(result)], "trained") for result in group])
        )
    title = f"{stream_of(results[0])}, {backbone_of(results[0])}"
    every = [path for paths in kinds.values() for path in paths]
    return Probes(title, measured[0]["settings"]["rows"], first.chance, {**kinds, ALL: every}, models)


def _rows_of(measured: Mapping[str, Tree], model: str) -> TaskRows:
    layers = measured["models"][model]
    return TaskRows(list(measured["tasks"]), {path: list(map(unpacked_rows, rows)) for path, rows in layers.items()})


def probe_table(probes: Probes) -> str:
    """Return the table of layer kinds by models: percent of large outputs that two tasks share, mean over pairs."""
    runs = [f", {len(m.runs)} runs" if len(m.runs) > 1 and m.title != UNTRAINED else "" for m in probes.models]
    table = grid(["layers", *(f"{model.title}{more}" for model, more in zip(probes.models, runs, strict=True))])
    for kind, paths in probes.kinds.items():
        if kind == ALL:
            table.add_section()
        table.add_row(f"{kind} ({len(paths)})", *(points(model.mean_overlap(paths)) for model in probes.models))
    head = (
        f"large outputs that two tasks share, in percent, mean over pairs of {len(probes.models[0].tasks)} tasks, "
        f"at most {probes.rows} texts each: {probes.title}"
    )
    return render(Group(Text(head), table, Text(f"{probes.chance:.1f} is chance")))


def probe_csv(probes: Sequence[Probes]) -> str:
    """Return a line for each model and kind of layer, in full precision."""
    rows: list[list[Any]] = [["models", "model", "runs", "layers", "count", "overlap", "overlap_std", "chance"]]
    for probe in probes:
        for model in probe.models:
            for kind, paths in probe.kinds.items():
                spread = model.mean_overlap(paths)
                numbers = [None, None] if spread is None else [spread.mean, spread.std]
                rows.append([probe.title, model.title, len(model.runs), kind, len(paths), *numbers, probe.chance])
    return spreadsheet(rows)
