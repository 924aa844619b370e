"""Pictures of a report's page beside those of `plots`: scores and intervals, curves over time, bars, overlaps."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raycl.config import Tree
from raycl.metrics.run_results import METRICS, short_names, unknown_of
from raycl.operations.report.phase_summaries import OutputRows, false_alarms_of
from raycl.operations.report.plots import COLOURS, MARGIN, axes_at, draw_cells, matrix_panels, new_figure
from raycl.operations.report.router_plots import OOD_WIDTH, look_of
from raycl.operations.report.run_comparison import Line, SeedMatrix, Spread, labels
from raycl.operations.report.verdicts import Verdict

PANEL_WIDTH = 11.7
"""Inches inside a panel of the page where it is widest, at 96 pixels an inch."""

WIDTH, LEFT, ROW = 3.0, 2.6, 0.3
"""Inches of a panel's axes, of the names on its left, and of a method's line."""
PANEL, COLUMNS = 2.7, 3
"""Inches that a task's panel of curves is wide, and panels in a row."""
WORD_COLOURS = {"better": COLOURS[2], "worse": COLOURS[1], "cannot be told": "#777777"}
WORD_MARKERS = {"better": "^", "worse": "v", "cannot be told": "o"}
BARS = {"f_ra": COLOURS[1], "bwt": COLOURS[0], "fwt": COLOURS[4]}


def scores_figure(lines: Sequence[Line]) -> Figure:
    """Return AP of each line with its standard deviation over seeds, and the published number beside it."""
    figure, axes = _listed([line.title for line in lines])
    for place, line in enumerate(lines):
        ap = line.numbers["ap"]
        if ap is not None:
            axes.errorbar(ap.mean, place, xerr=ap.std, fmt="o", color=COLOURS[0], capsize=3, label="here" * (not place))
        if "ap" in line.published:
            axes.plot(line.published["ap"], place, "D", color=COLOURS[1], fillstyle="none", label="published")
    _legend(axes)
    highest = [line.numbers["ap"].mean for line in lines if line.numbers["ap"] is not None]
    highest += [line.published["ap"] for line in lines if "ap" in line.published]
    axes.set(xlim=(0, min(103, max(1.2 * max(highest), 10))))  # a mark at 100 is whole
    axes.set_xlabel("AP", fontsize=9)
    return figure


def verdicts_figure(verdicts: Sequence[Verdict]) -> Figure:
    """Return the difference of each method from its reference with its 95 % interval; the word is colour and marker."""
    shared = len({verdict.second for verdict in verdicts}) == 1
    figure, axes = _listed([v.first if shared else f"{v.first} – {v.second}" for v in verdicts])
    for place, verdict in enumerate(verdicts):
        known = verdict.difference
        if known is not None:
            low, high = known.interval or (known.mean, known.mean)
            colour, marker = WORD_COLOURS[verdict.word], WORD_MARKERS[verdict.word]
            axes.plot((low, high), (place, place), color=colour, linewidth=1.6)
            axes.plot(known.mean, place, marker, color=colour, label=verdict.word)
    axes.axvline(0, color="black", linewidth=0.8)
    _legend(axes)
    reference = " from the reference" if shared else ""
    axes.set_xlabel(f"difference of {METRICS[verdicts[0].measure]}{reference}, 95 % interval", fontsize=9)
    return figure


def curves_figure(matrices: Sequence[SeedMatrix]) -> Figure:
    """Return a panel for each task: its score after each phase, a line for each method, mean over seeds."""
    tasks = list(dict.fromkeys(task for matrix in matrices for task in matrix.tasks))
    below = 0.2 * math.ceil(len(matrices) / 2) + 0.1
    figure, panels = _curve_panels(tasks, "tasks learned", 2.1, below)
    for task, axes in zip(tasks, panels, strict=True):
        for number, matrix in enumerate(matrices):
            if task not in matrix.tasks:
                continue
            cells = [row[matrix.tasks.index(task)] for row in matrix.cells]
            points = [(place, cell.mean) for place, cell in enumerate(cells, 1) if cell is not None]
            label = matrix.title.partition(" on ")[0]
            axes.plot(*zip(*points, strict=True), **look_of(number), markersize=4, linewidth=1.4, label=label)
        axes.set(xlim=(0.7, len(matrices[0].phases) + 0.3))
        axes.set_xticks(range(1, len(matrices[0].phases) + 1))
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower left", ncols=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, below / figure.get_figheight(), 1, 1))
    return figure


def epochs_figure(results: Sequence[Tree]) -> Figure:
    """Return the score of each task over its own epochs, a panel for each run."""
    titles = [title.partition(" on ")[0] for title in labels(results)]
    figure, panels = _curve_panels(titles, "epochs of the task", 2.4)
    for axes, result in zip(panels, results, strict=True):
        for number, (task, curve) in enumerate(result["epochs"].items()):
            points = sorted((int(epoch), value) for epoch, value in curve.items())
            axes.plot(*zip(*points, strict=True), **look_of(number), markersize=4, label=task)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return figure


def _curve_panels(titles: Sequence[str], what: str, tall: float, below: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Return a panel for curves of scores under each title; `below`: inches that are left free under all of them."""
    rows = math.ceil(len(titles) / COLUMNS)
    figure = new_figure(COLUMNS * PANEL, rows * tall + below)
    panels = list(figure.subplots(rows, COLUMNS, squeeze=False, sharey=True).flat)
    for title, axes in zip(titles, panels, strict=False):
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel(what, fontsize=8)
        axes.set(ylim=(-3, 103))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    for axes in panels[len(titles) :]:
        axes.set_visible(False)
    return figure, panels[: len(titles)]


def general_figure(lines: Sequence[Line]) -> Figure:
    """Return the mean score outside the stream of each line, before any training and after the last task."""
    figure, axes = _listed([line.title for line in lines])
    for place, line in enumerate(lines):
        before, after = line.numbers["general_before"], line.numbers["general_after"]
        if before is not None and after is not None:
            axes.plot((before.mean, after.mean), (place, place), color="#777777", linewidth=1.4)
            axes.plot(before.mean, place, "o", color=COLOURS[0], fillstyle="none", label="before")
            axes.errorbar(after.mean, place, xerr=after.std, fmt="D", color=COLOURS[1], capsize=3, label="after")
    _legend(axes)
    axes.set_xlabel("mean score of tasks outside the stream", fontsize=9)
    return figure


def unknown_figure(results: Sequence[Tree]) -> Figure:
    """Return the percent of texts of each task outside the stream that count as texts of no learned task, a mark for
    each run, and a line at the percent that texts of learned tasks may reach."""
    tasks = list(dict.fromkeys(task for result in results for task in unknown_of(result)))
    figure, axes = _listed(tasks, left=MARGIN, width=OOD_WIDTH)
    for number, (title, result) in enumerate(zip(labels(results), results, strict=True)):
        shares = unknown_of(result)
        axes.plot(list(shares.values()), [*map(tasks.index, shares)], linestyle="", **look_of(number), label=title)
    for rate in sorted({rate for result in results if (rate := false_alarms_of(result)) is not None}):
        axes.axvline(100 * rate, color="black", linewidth=1, linestyle="--", label=f"eval.false_alarms={rate:g}")
    _legend(axes, columns=1, left=-MARGIN / OOD_WIDTH)
    axes.set(xlim=(-3, 103))
    axes.set_xlabel("unknown texts, in percent", fontsize=9)
    return figure


def transfer_figure(lines: Sequence[Line]) -> Figure:
    """Return F.Ra, BWT and FWT of each line as bars with standard deviations."""
    names = [name for name in BARS if any(line.numbers[name] for line in lines)]
    figure, axes = _listed([line.title for line in lines], ROW * max(1.0, 0.6 * len(names)))
    thick = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        spreads: list[Spread | None] = [line.numbers[name] for line in lines]
        places = np.arange(len(lines)) + (number - (len(names) - 1) / 2) * thick
        axes.barh(
            places,
            [spread.mean if spread else np.nan for spread in spreads],
            0.9 * thick,
            xerr=[np.nan if spread is None or spread.std is None else spread.std for spread in spreads],
            error_kw={"ecolor": "black", "elinewidth": 0.8, "capsize": 2},
            color=BARS[name],
            label=METRICS[name],
        )
    axes.axvline(0, color="black", linewidth=0.8)
    _legend(axes)
    axes.set_xlabel("points", fontsize=9)
    return figure


def overlap_figure(results: Sequence[Tree]) -> Figure:
    """Return for each run the percent of output rows that two tasks both kept under MIGU's mask."""
    kept = [OutputRows.of(result) for result in results]
    titles = labels(results)
    figure, panels, _ = matrix_panels(titles, [(len(run.tasks), len(run.tasks)) for run in kept], 0.0, PANEL_WIDTH)
    for run, title, axes in zip(kept, titles, panels, strict=True):
        draw_cells(axes, np.array(run.overlap()), run.tasks, run.tasks)
        axes.set_title(f"{title}\nchance {run.chance:.1f}", fontsize=9, loc="left")
    return figure


def _listed(names: Sequence[str], row: float = ROW, left: float = LEFT, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return axes with a line for each name, the first on top."""
    height = row * len(names) + 0.3
    figure = new_figure(left + width + 0.4, height + 1.2)
    axes = axes_at(figure, left, width, height, 0.2)
    axes.set_yticks(range(len(names)), short_names(names, round(40 * left / LEFT)), fontsize=8)
    axes.set(ylim=(len(names) - 0.5, -0.5))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure, axes


def _legend(axes: Axes, columns: int = 3, left: float = 0.0) -> None:
    """Name each mark once, below the axes; `left`: its distance from theirs, in widths of the axes."""
    by_name = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    by_name.pop("", None)
    height = axes.bbox.height / axes.figure.dpi
    if by_name:
        axes.legend(
            by_name.values(),
            by_name.keys(),
            loc="upper left",
            bbox_to_anchor=(left, -0.45 / height),
            ncols=columns,
            frameon=False,
            fontsize=8,
        )
