"""Pictures of runs as heat maps: accuracy matrices, attention, and the overlap of large outputs.

Colours: viridis for heat maps, Okabe and Ito's eight for lines, both readable with colour-vision deficiencies and in
grey print.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from raycl.config import Tree
from raycl.errors import RunError
from raycl.metrics.run_results import short_names
from raycl.operations.report.output_row_probe import ALL, Probes
from raycl.operations.report.phase_summaries import AttentionWeights
from raycl.operations.report.run_comparison import Spread, labels, seed_matrices
from raycl.operations.report.tables import points
from raycl.storage.output import write_output

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
DARK = "#010101"
"""Letters in light cells; unlike black they stay dark on a page in dark mode."""
SCALE = Normalize(0, 100)
COLOUR_MAP = "viridis"
PIXELS_PER_INCH = 150
CELL_WIDTH, CELL_HEIGHT = 0.56, 0.42
"""Inches of a cell: three digits and a point fit."""
MOST_PANELS = 40
MOST_RUNS, MOST_TASKS = 6, 40
ATTENTION_ABOVE, ATTENTION_BELOW, PROBE_ABOVE, PROBE_BELOW = 0.6, 0.8, 1.0, 1.3
"""Inches above the maps of a run for titles, and below them for names."""
MARGIN = 1.3
"""Inches left of a matrix, for the names of its rows."""
MATRIX_ABOVE, MATRIX_BELOW = 1.0, 1.2
"""Inches above a matrix for its title, and below it for the names of its columns."""
SHAPE, MOST_STRETCHED = 1.4, 2.0
"""Width over height that panels are arranged for, and how many times a side may be the other, in every picture."""


def matrix_figure(results: Sequence[Tree], widest: float = math.inf) -> Figure:
    """Return a matrix for each setting, one colour scale from 0 to 100.

    Runs that differ in their seeds alone have one: means, with the standard deviation below them.

    Args:
        widest: see `arranged`.

    Raises:
        RunError: no results, or more than `MOST_PANELS` settings.
    """
    matrices = seed_matrices(results)
    if not 0 < len(matrices) <= MOST_PANELS:
        raise RunError(f"a picture of {len(matrices)} settings cannot be read: give between 1 and {MOST_PANELS}")
    shapes = [(len(matrix.tasks), len(matrix.phases)) for matrix in matrices]
    figure, panels, right = matrix_panels([matrix.title for matrix in matrices], shapes, 1.0, widest)
    for matrix, axes in zip(matrices, panels, strict=True):
        deviations = [[cell and cell.std for cell in row] for row in matrix.cells]
        draw_cells(axes, means_of(matrix.cells), matrix.tasks, matrix.phases, np.array(deviations, dtype=float))
        axes.set_xlabel("score on", fontsize=9)
        axes.set_ylabel("after training on", fontsize=9)
        known = {title: matrix.numbers[name] for title, name in (("AP", "ap"), ("F.Ra", "f_ra"))}
        numbers = [f"{title} {points(value)}" for title, value in known.items() if value is not None]
        axes.set_title(f"{matrix.title}\n{'   '.join(numbers)}", fontsize=9, loc="left")
    draw_scale(axes_at(figure, right + 0.2, 0.12, max(CELL_HEIGHT * len(matrices[0].phases), 1.2), MATRIX_ABOVE))
    return figure


def matrix_panels(
    titles: Sequence[str], shapes: Sequence[tuple[int, int]], right: float, widest: float
) -> tuple[Figure, list[Axes], float]:
    """Return a page, axes for a matrix under each title, and the right edge of the rightmost, in inches.

    Args:
        shapes: columns and rows of each matrix. right, widest: see `arranged`.
    """
    sizes = [(CELL_WIDTH * columns, CELL_HEIGHT * rows) for columns, rows in shapes]
    rooms = [
        (MARGIN + max(width, 0.08 * len(title)), MATRIX_ABOVE + height + MATRIX_BELOW)
        for title, (width, height) in zip(titles, sizes, strict=True)
    ]
    figure, corners = arranged(rooms, right, widest)
    panels = [
        axes_at(figure, left + MARGIN, width, height, top + MATRIX_ABOVE)
        for (left, top), (width, height) in zip(corners, sizes, strict=True)
    ]
    return figure, panels, max(left + MARGIN + width for (left, _), (width, _) in zip(corners, sizes, strict=True))


def means_of(cells: Sequence[Sequence[Spread | None]]) -> NDArray[np.float64]:
    """Return the means of cells, NaN where there is none."""
    return np.array([[np.nan if cell is None else cell.mean for cell in row] for row in cells], dtype=float)


def arranged(
    rooms: Sequence[tuple[float, float]], right: float = 0.0, widest: float = math.inf
) -> tuple[Figure, list[tuple[float, float]]]:
    """Return a page for panels in rows from left to right, and the left and top of each panel.

    Rows are as long as makes the page's shape nearest to `SHAPE`.

    Args:
        rooms: width and height of each panel. right: further width of the page. widest: largest width of the page,
            which only a panel that is wider than it exceeds. All in inches.
    """

    def page(limit: float) -> tuple[float, float, list[tuple[float, float]]]:
        corners, bands, left = [], [0.0], 0.0
        for wide, height in rooms:
            if left and left + wide + right > limit:
                bands.append(0.0)
                left = 0.0
            corners.append((left, sum(bands[:-1])))
            left, bands[-1] = left + wide, max(bands[-1], height)
        width = max(left + wide for (left, _), (wide, _) in zip(corners, rooms, strict=True)) + right
        return width, sum(bands), corners

    limits = {min(widest, sum(wide for wide, _ in rooms[:count]) + right) for count in range(1, len(rooms) + 1)}
    width, height, corners = min(map(page, sorted(limits)), key=lambda sized: _distance(*sized[:2]))
    return new_figure(width, height), corners


def _distance(width: float, height: float) -> float:
    """Return how far a page's shape is from `SHAPE`."""
    return abs(math.log(width / height / SHAPE))


def axes_at(figure: Figure, left: float, width: float, height: float, top: float = 1.0) -> Axes:
    """Return axes of this size whose top is this far below the figure's, all in inches."""
    total_width, total_height = figure.get_size_inches()
    bottom = total_height - top - height
    return figure.add_axes((left / total_width, bottom / total_height, width / total_width, height / total_height))


def draw_scale(axes: Axes) -> None:
    """Draw the scale of colours from 0 to 100."""
    axes.figure.colorbar(ScalarMappable(SCALE, COLOUR_MAP), cax=axes, ticks=range(0, 101, 20))
    axes.tick_params(labelsize=8)


def draw_cells(
    axes: Axes,
    cells: NDArray[np.float64],
    columns: Sequence[str],
    rows: Sequence[str],
    deviations: NDArray[np.float64] | None = None,
) -> None:
    """Draw numbers from 0 to 100 as a heat map with the number in each cell, and its deviation; NaN is left blank."""
    axes.imshow(np.ma.masked_invalid(cells), cmap=COLOUR_MAP, norm=SCALE, aspect="auto")
    for place, value in np.ndenumerate(cells):
        if np.isnan(value):
            continue
        spread = "" if deviations is None or np.isnan(deviations[place]) else f"\n± {deviations[place]:.1f}"
        axes.text(place[1], place[0], f"{value:.1f}{spread}", ha="center", va="center", color=_ink(value), fontsize=8)
    below = short_names(columns)
    axes.set_xticks(range(len(below)), below, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(len(rows)), short_names(rows), fontsize=8)
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(cells.shape[1] - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(cells.shape[0] - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)  # lines between the cells
    axes.tick_params(which="both", length=0)


def _ink(value: float) -> str:
    """Return dark letters for light cells, white for dark ones, by the relative luminance of the cell."""
    red, green, blue, _ = colormaps[COLOUR_MAP](SCALE(value))
    return DARK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45 else "white"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty page of this size in inches."""
    figure = Figure(figsize=(width, height), dpi=PIXELS_PER_INCH)
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, path: str | Path) -> Path:
    """Write the picture, and its folder where there is none.

    It has no empty margins, unless without them one side would be more than `MOST_STRETCHED` times the other.

    Raises:
        StorageError: it cannot be written.
    """
    written = io.BytesIO()
    with _plain_words(figure):
        figure.savefig(written, format="png", bbox_inches=_framed(figure))
    return write_output(path, written.getvalue())


def svg_of(figure: Figure) -> str:
    """Return the picture as an SVG element for a page: words stay words; black, white and grey follow the page."""
    written = io.StringIO()
    with _plain_words(figure), rc_context({"svg.fonttype": "none", "svg.hashsalt": "raycl"}):
        framed = figure.get_tightbbox().padded(0.1)
        figure.savefig(written, format="svg", bbox_inches=framed, transparent=True, metadata={"Date": None})
    text = written.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"(stroke|fill): #000000", r"\1: currentColor", text)
    return text.replace("stroke: #ffffff", "stroke: var(--panel)").replace("fill: #666666", "fill: var(--mute)")


@contextmanager
def _plain_words(figure: Figure) -> Iterator[None]:
    """Take names with two dollars for no formulas."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with rc_context({"text.parse_math": False}):
        yield


def _framed(figure: Figure) -> Bbox:
    """Return the part of the page that is drawn on, in inches, within the limits of its shape."""
    drawn = figure.get_tightbbox().padded(0.1)
    wide = max(0.0, drawn.height / MOST_STRETCHED - drawn.width) / 2
    high = max(0.0, drawn.width / MOST_STRETCHED - drawn.height) / 2
    return drawn.padded(wide, high)


def attention_figure(results: Sequence[Tree]) -> Figure:
    """Return one row per run: mean weights in percent when each task was learned, and at the end.

    Raises:
        RunError: no results, more than `MOST_RUNS`, or one with more than `MOST_TASKS` tasks.
    """
    if not results:
        raise RunError("none of these runs has attention to draw: expected runs of sapt")
    if len(results) > MOST_RUNS:
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
    return figure


def probe_maps(probes: Sequence[Probes], path: str | Path) -> Path:
    """Draw a block of maps for each stream and backbone as a PNG at `path`; mean over layers and runs, in percent.

    Raises:
        RunError: a block has more maps than can be read.
    """
    most = max(len(probe.models) for probe in probes)
    if most > MOST_PANELS:
        raise RunError(f"a picture of {most} models cannot be read: give runs of at most {MOST_PANELS - 1} settings")
    counts = [len(probe.models[0].tasks) for probe in probes]
    panel = max(CELL_WIDTH * max(counts), 2.2) + MARGIN

    def size(columns: int) -> tuple[float, float]:
        rows = [math.ceil(len(probe.models) / columns) for probe in probes]
        maps = sum(row * (CELL_HEIGHT * count + PROBE_BELOW) for row, count in zip(rows, counts, strict=True))
        return panel * columns + 1.0, maps + PROBE_ABOVE * len(probes)

    columns = min(range(1, most + 1), key=lambda number: _distance(*size(number)))
    figure = new_figure(*size(columns))
    width, height = size(columns)
    top = 0.0
    for probe, count in zip(probes, counts, strict=True):
        top += PROBE_ABOVE
        layers = f"{len(probe.kinds[ALL])} layers" if len(probe.kinds[ALL]) > 1 else probe.kinds[ALL][0]
        head = f"large outputs that two tasks share, in percent: {probe.title}, {layers}; {probe.chance:.0f} is chance"
        figure.text(MARGIN / width, 1 - (top - 0.6) / height, head, fontsize=10, fontweight="bold", va="bottom")
        tall = CELL_HEIGHT * count
        right = MARGIN + panel * (min(columns, len(probe.models)) - 1) + CELL_WIDTH * count
        draw_scale(axes_at(figure, right + 0.2, 0.12, max(tall, 1.2), top))
        for number, model in enumerate(probe.models):
            row, column = divmod(number, columns)
            below = top + row * (tall + PROBE_BELOW)
            axes = axes_at(figure, MARGIN + panel * column, CELL_WIDTH * count, tall, below)
            draw_cells(axes, np.array(model.overlap(probe.kinds[ALL])), model.tasks, model.tasks)
            mean = model.mean_overlap(probe.kinds[ALL])
            number_shown = "" if mean is None else f"   {mean.mean:.1f}"
            axes_title = model.title.replace(" (", "\n(", 1) + number_shown
            axes.set_title(axes_title, fontsize=9, loc="left")
        top += math.ceil(len(probe.models) / columns) * (tall + PROBE_BELOW)
    return save_png(figure, path)
