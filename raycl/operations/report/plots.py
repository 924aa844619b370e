"""Pictures of runs as heat maps: accuracy matrices, attention, and the overlap of large outputs.

Colours: viridis for heat maps, Okabe and Ito's eight for lines, both readable with colour-vision deficiencies and in
grey print.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray

from raycl.config import Tree
from raycl.errors import RunError
from raycl.metrics.run_results import metric_of, short_names, tasks_of, title_of, values_of
from raycl.operations.report.output_row_probe import ALL, Probes
from raycl.operations.report.phase_summaries import AttentionWeights
from raycl.operations.report.run_comparison import labels

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
SCALE = Normalize(0, 100)
COLOUR_MAP = "viridis"
PIXELS_PER_INCH = 150
CELL_WIDTH, CELL_HEIGHT = 0.56, 0.42
"""Inches of a cell: three digits and a point fit."""
MOST_PANELS = 12
MOST_RUNS, MOST_TASKS = 6, 40
ATTENTION_ABOVE, ATTENTION_BELOW, PROBE_ABOVE, PROBE_BELOW = 0.6, 0.8, 1.0, 1.1
"""Inches above the maps of a run for titles, and below them for names."""
MARGIN = 1.3
"""Inches left of a matrix, for the names of its rows."""


def heatmaps(results: Sequence[Tree], path: str | Path) -> Path:
    """Draw the matrices of several runs next to each other, one colour scale from 0 to 100, as a PNG at `path`.

    Raises:
        RunError: no results, or more than `MOST_PANELS`.
    """
    if not 0 < len(results) <= MOST_PANELS:
        raise RunError(f"a picture of {len(results)} runs cannot be read: give between 1 and {MOST_PANELS}")
    heights = [CELL_HEIGHT * len(result["phases"]) for result in results]
    widths = [CELL_WIDTH * len(tasks_of(result)) for result in results]
    rooms = [max(width, len(title_of(result)) * 0.08) for width, result in zip(widths, results, strict=True)]
    figure = new_figure(sum(rooms) + MARGIN * len(results) + 1.0, max(heights) + 2.0)
    lefts = [MARGIN * (number + 1) + sum(rooms[:number]) for number in range(len(results))]
    for result, left, width, height in zip(results, lefts, widths, heights, strict=True):
        axes = axes_at(figure, left, width, height)
        cells = np.array([[np.nan if v is None else v for v in row] for row in values_of(result)], dtype=float)
        draw_cells(axes, cells, tasks_of(result), [str(phase) for phase in result["phases"]])
        axes.set_xlabel("score on", fontsize=9)
        axes.set_ylabel("after training on", fontsize=9)
        known = {title: metric_of(result, name) for title, name in (("AP", "ap"), ("F.Ra", "f_ra"))}
        numbers = [f"{title} {value:.1f}" for title, value in known.items() if value is not None]
        axes.set_title(f"{title_of(result)}\n{'   '.join(numbers)}", fontsize=9, loc="left")
    draw_scale(axes_at(figure, lefts[-1] + widths[-1] + 0.2, 0.12, max(*heights, 1.2)))
    return save_png(figure, path)


def axes_at(figure: Figure, left: float, width: float, height: float, top: float = 1.0) -> Axes:
    """Return axes of this size whose top is this far below the figure's, all in inches."""
    total_width, total_height = figure.get_size_inches()
    bottom = total_height - top - height
    return figure.add_axes((left / total_width, bottom / total_height, width / total_width, height / total_height))


def draw_scale(axes: Axes) -> None:
    """Draw the scale of colours from 0 to 100."""
    axes.figure.colorbar(ScalarMappable(SCALE, COLOUR_MAP), cax=axes, ticks=range(0, 101, 20))
    axes.tick_params(labelsize=8)


def draw_cells(axes: Axes, cells: NDArray[np.float64], columns: Sequence[str], rows: Sequence[str]) -> None:
    """Draw numbers from 0 to 100 as a heat map with the number in each cell; NaN is left blank."""
    axes.imshow(np.ma.masked_invalid(cells), cmap=COLOUR_MAP, norm=SCALE, aspect="auto")
    for (i, j), value in np.ndenumerate(cells):
        if not np.isnan(value):
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=_ink(value), fontsize=8)
    below = short_names(columns)
    axes.set_xticks(range(len(below)), below, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(len(rows)), short_names(rows), fontsize=8)
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(cells.shape[1] - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(cells.shape[0] - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)  # lines between the cells
    axes.tick_params(which="both", length=0)


def _ink(value: float) -> str:
    """Return black for light cells, white for dark ones, by the relative luminance of the cell."""
    red, green, blue, _ = colormaps[COLOUR_MAP](SCALE(value))
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45 else "white"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty page of this size in inches."""
    figure = Figure(figsize=(width, height), dpi=PIXELS_PER_INCH)
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, path: str | Path) -> Path:
    """Write the picture without empty margins, and its folder where there is none."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names with two dollars are no formulas
    with rc_context({"text.parse_math": False}):
        figure.savefig(target, format="png", bbox_inches="tight")
    return target


def attention_maps(results: Sequence[Tree], path: str | Path) -> Path:
    """Draw one row per run as a PNG at `path`: mean weights in percent when each task was learned, and at the end.

    Raises:
        RunError: no results, more than `MOST_RUNS`, a run without attention or with more than `MOST_TASKS` tasks.
    """
    if not 0 < len(results) <= MOST_RUNS:
        raise RunError(f"a picture of attention in {len(results)} runs cannot be read: give between 1 and {MOST_RUNS}")
    attention = [AttentionWeights.of(result) for result in results]
    most = max(len(run.keys) for run in attention)
    if most > MOST_TASKS:
        raise RunError(f"a picture of attention to {most} tasks cannot be read: give runs of at most {MOST_TASKS}")
    widths = [CELL_WIDTH * len(run.keys) for run in attention]
    heights = [CELL_HEIGHT * max(len(run.train), len(run.test), 1) for run in attention]
    second = 2 * MARGIN + max(*widths, 3.0)
    figure = new_figure(
        second + max(*widths, 3.0) + 1.0, sum(heights) + (ATTENTION_ABOVE + ATTENTION_BELOW) * len(attention)
    )
    top = 0.0
    for title, run, width, height in zip(labels(results), attention, widths, heights, strict=True):
        top += ATTENTION_ABOVE
        maps = {f"{title}\nwhen it was learned": (MARGIN, run.train), "at the end (test texts)": (second, run.test)}
        for head, (left, weights) in maps.items():
            if not weights:
                continue
            axes = axes_at(figure, left, width, CELL_HEIGHT * len(weights), top)
            draw_cells(axes, 100 * np.array(list(weights.values())), run.keys, list(weights))
            axes.set_title(head, fontsize=9, loc="left")
            axes.set_ylabel("texts of", fontsize=9)
        draw_scale(axes_at(figure, second + width + 0.2, 0.12, height, top))
        top += height + ATTENTION_BELOW
    return save_png(figure, path)


def probe_maps(probes: Sequence[Probes], path: str | Path) -> Path:
    """Return a row of maps for each stream and backbone as a PNG at `path`; mean over layers and runs, in percent.

    Raises:
        RunError: a row has more maps than can be read.
    """
    most = max(len(probe.models) for probe in probes)
    if most > MOST_PANELS:
        raise RunError(
            f"a picture of {most} models in a row cannot be read: give runs of at most {MOST_PANELS - 1} settings"
        )
    counts = [len(probe.models[0].tasks) for probe in probes]
    panel = max(CELL_WIDTH * max(counts), 2.2) + MARGIN
    heights = [CELL_HEIGHT * count for count in counts]
    figure = new_figure(panel * most + 1.0, sum(heights) + (PROBE_ABOVE + PROBE_BELOW) * len(probes))
    width, height = figure.get_size_inches()
    top = 0.0
    for probe, count, tall in zip(probes, counts, heights, strict=True):
        top += PROBE_ABOVE
        layers = f"{len(probe.kinds[ALL])} layers" if len(probe.kinds[ALL]) > 1 else probe.kinds[ALL][0]
        head = f"large outputs that two tasks share, in percent: {probe.title}, {layers}; {probe.chance:.0f} is chance"
        figure.text(MARGIN / width, 1 - (top - 0.6) / height, head, fontsize=10, fontweight="bold", va="bottom")
        for number, model in enumerate(probe.models):
            axes = axes_at(figure, MARGIN + panel * number, CELL_WIDTH * count, tall, top)
            draw_cells(axes, np.array(model.overlap(probe.kinds[ALL])), model.tasks, model.tasks)
            mean = model.mean_overlap(probe.kinds[ALL])
            number_shown = "" if mean is None else f"   {mean.mean:.1f}"
            axes_title = model.title.replace(" (", "\n(", 1) + number_shown
            axes.set_title(axes_title, fontsize=9, loc="left")
        right = MARGIN + panel * (len(probe.models) - 1) + CELL_WIDTH * count
        draw_scale(axes_at(figure, right + 0.2, 0.12, max(tall, 1.2), top))
        top += tall + PROBE_BELOW
    return save_png(figure, path)
