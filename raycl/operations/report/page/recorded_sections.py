"""Sections of a page about recorded runs: CSV files with one line a run, kept where their folders are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from raycl.errors import RunError
from raycl.operations.report.page.page_figures import scores_figure
from raycl.operations.report.page.sections import (
    PageSection,
    comparison_section,
    cost_section,
    transfer_section,
    verdict_section,
)
from raycl.operations.report.plots import CELL_HEIGHT, CELL_WIDTH, MARGIN, axes_at, draw_cells, new_figure
from raycl.operations.report.recorded_runs import SCORE, RecordedRuns
from raycl.operations.report.run_comparison import Spread
from raycl.operations.report.tables import Page, points
from raycl.operations.report.verdicts import Verdict
from raycl.text_tables import grid

ABOVE, BELOW = 0.2, 1.0
"""Inches above and below a heat map."""
MOST_COLUMNS = 16
"""Columns of a heat map that fit on a page."""


def recorded_sections(studies: Sequence[RecordedRuns], against: str | None = None) -> list[PageSection]:
    """Return the sections of each file, in the order of the files.

    Args:
        against: the row that is the reference of the verdicts; None: of each file the row with the highest AP of those
            that learn the tasks one after another.

    Raises:
        RunError: no file has this row, or a file has no runs.
    """
    if against is not None and not any(against in study.runs for study in studies):
        names = ", ".join(dict.fromkeys(row for study in studies for row in study.runs))
        raise RunError(f"no row of these runs is named '{against}': expected one of {names}")
    overview = [_overview(studies)] if len(studies) > 1 else []
    return [*overview, *(section for study in studies for section in _of_study(study, against))]


def recorded_verdicts(study: RecordedRuns, against: str | None = None) -> list[Verdict]:
    """Return the verdict on each row against the reference; p-values count all pairs unless the reference is named."""
    rows = study.competing()
    if against is not None:
        return study.verdicts([(row, against) for row in rows if row != against]) if against in study.runs else []
    first, *others = rows
    made = study.verdicts([(row, first) for row in others] + list(combinations(others, 2)))
    return made[: len(others)]


def _of_study(study: RecordedRuns, against: str | None) -> list[PageSection]:
    lines = study.lines()
    verdicts = recorded_verdicts(study, against)
    sections = [
        replace(comparison_section(lines), figure=scores_figure(lines[: len(study.competing())])),
        verdict_section(verdicts) if verdicts else None,
        _scores(study),
        transfer_section(lines),
        cost_section(lines),
    ]
    where = ", ".join(study.where)
    return [replace(section, title=f"{section.title}: {where}") for section in sections if section is not None]


def _overview(studies: Sequence[RecordedRuns]) -> PageSection:
    """Return AP of the rows that all files have, the highest mean first."""
    known = [{line.method: line for line in study.lines()} for study in studies]
    rows = [row for row in studies[0].competing() if all(row in study.competing() for study in studies)]
    aps = {row: [lines[row].numbers["ap"] for lines in known] for row in rows}
    rows.sort(key=lambda row: -fmean(ap.mean for ap in aps[row] if ap is not None))
    table = grid(
        ["method", *(", ".join(study.where) for study in studies)], [[row, *map(points, aps[row])] for row in rows]
    )
    backbones = [study.where[1] for study in studies]
    names = backbones if len(set(backbones)) == len(studies) else [study.where[0] for study in studies]
    cells = [[aps[row][place] for row in rows] for place in range(len(studies))]
    lead = [
        "AP of the methods that all files have and that learn the tasks one after another, means over seeds; the "
        "highest mean comes first."
    ]
    return PageSection("AP on each stream", _cells_figure(_means(cells), rows, names), lead, numbers=[Page(table)])


def _scores(study: RecordedRuns) -> PageSection:
    """Return the last score of each task, a line for each row of runs."""
    rows = [line.method for line in study.lines()]
    cells = [[Spread.over(study.numbers(row, f"{SCORE}{task}")) for task in study.tasks] for row in rows]
    table = grid(["method", *study.tasks], [[row, *map(points, known)] for row, known in zip(rows, cells, strict=True)])
    lead = ["Scores after the last task, means over seeds."]
    return PageSection("Scores of tasks", _cells_figure(_means(cells), study.tasks, rows), lead, numbers=[Page(table)])


Cells = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _means(cells: Sequence[Sequence[Spread | None]]) -> Cells:
    return np.array([[np.nan if cell is None else cell.mean for cell in row] for row in cells])


def _cells_figure(means: Cells, columns: Sequence[str], rows: Sequence[str]) -> Figure:
    """Return a heat map, in parts of at most `MOST_COLUMNS` columns below each other."""
    starts = range(0, len(columns), MOST_COLUMNS)
    height, part = CELL_HEIGHT * len(rows), ABOVE + CELL_HEIGHT * len(rows) + BELOW
    figure = new_figure(MARGIN + CELL_WIDTH * min(len(columns), MOST_COLUMNS) + ABOVE, part * len(starts))
    for number, start in enumerate(starts):
        shown = columns[start : start + MOST_COLUMNS]
        axes = axes_at(figure, MARGIN, CELL_WIDTH * len(shown), height, part * number + ABOVE)
        draw_cells(axes, means[:, start : start + MOST_COLUMNS], shown, rows)
    return figure
