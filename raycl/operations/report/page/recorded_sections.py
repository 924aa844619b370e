"""Sections of a page about recorded runs: CSV files with one line a run, kept where their folders are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from raycl.errors import RunError
from raycl.operations.report.page.sections import (
    PageSection,
    comparison_section,
    cost_section,
    transfer_section,
    verdict_section,
)
from raycl.operations.report.plots import CELL_HEIGHT, CELL_WIDTH, MARGIN, axes_at, draw_cells, means_of, new_figure
from raycl.operations.report.recorded_runs import SCORE, RecordedRuns
from raycl.operations.report.run_comparison import Line, Spread
from raycl.operations.report.tables import Page, points
from raycl.operations.report.verdicts import Verdict
from raycl.text_tables import grid

ABOVE, BELOW = 0.2, 1.0
"""Inches above and below a heat map."""
MOST_COLUMNS = 16
"""Columns of a heat map that fit on a page."""


@dataclass(frozen=True)
class RecordedStudy:
    """A file of recorded runs as a page shows it.

    Attributes:
        lines: a comparison's lines. competing: names of the rows that learn one task after another, which come first.
        verdicts: on each of these rows against the reference.
    """

    runs: RecordedRuns
    lines: Sequence[Line]
    competing: Sequence[str]
    verdicts: Sequence[Verdict]

    @property
    def where(self) -> str:
        """Stream and backbone."""
        return f"{self.lines[0].stream}, {self.lines[0].backbone}"

    @staticmethod
    def of(runs: RecordedRuns, against: str | None = None) -> RecordedStudy:
        """Return the study; p-values count all pairs of rows unless the reference is named.

        Raises:
            RunError: the file has runs on several streams or backbones.
        """
        lines, competing = runs.lines(), runs.competing()
        benches = sorted({f"{line.stream}, {line.backbone}" for line in lines})
        if len(benches) > 1:
            raise RunError(f"'{runs.file}' has runs on {'; '.join(benches)}: expected one stream and backbone a file")
        if against is not None:
            pairs = [(row, against) for row in competing if row != against] if against in runs.runs else []
            return RecordedStudy(runs, lines, competing, runs.verdicts(pairs))
        pairs = [(row, competing[0]) for row in competing[1:]] + list(combinations(competing[1:], 2))
        return RecordedStudy(runs, lines, competing, runs.verdicts(pairs)[: max(0, len(competing) - 1)])


def studies_of(files: Sequence[RecordedRuns], against: str | None = None) -> list[RecordedStudy]:
    """Return a study of each file.

    Args:
        against: the row that is the reference of the verdicts; None: of each file the row with the highest AP of those
            that learn the tasks one after another.

    Raises:
        RunError: no file has this row, or see `RecordedStudy.of`.
    """
    if against is not None and not any(against in runs.runs for runs in files):
        names = ", ".join(dict.fromkeys(row for runs in files for row in runs.runs))
        raise RunError(f"no row of these runs is named '{against}': expected one of {names}")
    return [RecordedStudy.of(runs, against) for runs in files]


def recorded_sections(studies: Sequence[RecordedStudy]) -> list[PageSection]:
    """Return the sections of each study, in their order, and in front what all of them have."""
    overview = _overview(studies) if len(studies) > 1 else None
    sections = [section for study in studies for section in _of_study(study)]
    return sections if overview is None else [overview, *sections]


def _of_study(study: RecordedStudy) -> list[PageSection]:
    lines = study.lines
    sections = [
        comparison_section(lines, lines[: len(study.competing)]),
        verdict_section(study.verdicts) if study.verdicts else None,
        _scores(study),
        transfer_section(lines),
        cost_section(lines),
    ]
    return [replace(part, title=f"{part.title}: {study.where}") for part in sections if part is not None]


def _overview(studies: Sequence[RecordedStudy]) -> PageSection | None:
    """Return AP of the rows that all files have, the highest mean first; None: there are none."""
    known = [{line.method: line.numbers["ap"] for line in study.lines} for study in studies]
    aps = {
        row: [ap for ap in (numbers.get(row) for numbers in known) if ap is not None] for row in studies[0].competing
    }
    rows = [row for row in aps if len(aps[row]) == len(studies) and all(row in study.competing for study in studies)]
    if not rows:
        return None
    rows.sort(key=lambda row: -fmean(ap.mean for ap in aps[row]))
    table = grid(["method", *(study.where for study in studies)], [[row, *map(points, aps[row])] for row in rows])
    backbones = [study.lines[0].backbone for study in studies]
    names = backbones if len(set(backbones)) == len(studies) else [study.lines[0].stream for study in studies]
    cells = [[aps[row][place] for row in rows] for place in range(len(studies))]
    lead = [
        "AP of the methods that all files have and that learn the tasks one after another, means over seeds; the "
        "highest mean comes first."
    ]
    return PageSection("AP on each stream", _cells_figure(means_of(cells), rows, names), lead, numbers=[Page(table)])


def _scores(study: RecordedStudy) -> PageSection | None:
    """Return the last score of each task, a line for each row of runs; None: the file has no scores of tasks."""
    tasks, rows = study.runs.tasks, [line.method for line in study.lines]
    if not tasks:
        return None
    cells = [[Spread.over(study.runs.numbers(row, f"{SCORE}{task}")) for task in tasks] for row in rows]
    table = grid(["method", *tasks], [[row, *map(points, known)] for row, known in zip(rows, cells, strict=True)])
    lead = ["Scores after the last task, means over seeds."]
    return PageSection("Scores of tasks", _cells_figure(means_of(cells), tasks, rows), lead, numbers=[Page(table)])


def _cells_figure(means: NDArray[np.float64], columns: Sequence[str], rows: Sequence[str]) -> Figure:
    """Return a heat map, in parts of at most `MOST_COLUMNS` columns below each other."""
    starts = range(0, len(columns), MOST_COLUMNS)
    height, part = CELL_HEIGHT * len(rows), ABOVE + CELL_HEIGHT * len(rows) + BELOW
    figure = new_figure(MARGIN + CELL_WIDTH * min(len(columns), MOST_COLUMNS) + ABOVE, part * len(starts))
    for number, start in enumerate(starts):
        shown = columns[start : start + MOST_COLUMNS]
        axes = axes_at(figure, MARGIN, CELL_WIDTH * len(shown), height, part * number + ABOVE)
        draw_cells(axes, means[:, start : start + MOST_COLUMNS], shown, rows)
    return figure
