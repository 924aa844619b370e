"""Pictures of runs: the accuracy matrix as a heat map.

Forgetting is seen at a glance in a picture and hardly in a column of numbers.

Colours: viridis for heat maps, Okabe and Ito's eight for lines, both
readable with colour-vision deficiencies and in grey print.
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

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
SCALE = Normalize(0, 100)
COLOUR_MAP = "viridis"
PIXELS_PER_INCH = 150
CELL_WIDTH, CELL_HEIGHT = 0.56, 0.42
"""Inches of a cell: three digits and a point fit."""
MOST_PANELS = 12
MARGIN = 1.3
"""Inches left of a matrix, for the names of its rows."""


def heatmap(result: Tree, path: str | Path) -> Path:
    """Return the accuracy matrix of one run as a PNG at `path`: scores in the cells, unmeasured cells blank."""
    return heatmaps([result], path)


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
        _draw_matrix(axes_at(figure, left, width, height), result)
    draw_scale(axes_at(figure, lefts[-1] + widths[-1] + 0.2, 0.12, max(*heights, 1.2)))
    return save_png(figure, path)


def axes_at(figure: Figure, left: float, width: float, height: float, top: float = 1.0) -> Axes:
    """Return axes of this size whose top is this far below the figure's, all in inches."""
    total_width, total_height = figure.get_size_inches()
    bottom = total_height - top - height
    return figure.add_axes((left / total_width, bottom / total_height, width / total_width, height / total_height))


def _draw_matrix(axes: Axes, result: Tree) -> None:
    cells = np.array([[np.nan if v is None else v for v in row] for row in values_of(result)], dtype=float)
    draw_cells(axes, cells, tasks_of(result), [str(phase) for phase in result["phases"]])
    axes.set_xlabel("score on", fontsize=9)
    axes.set_ylabel("after training on", fontsize=9)
    axes.set_title(_headline(result), fontsize=9, loc="left")


def draw_scale(axes: Axes) -> None:
    """Draw the scale of colours from 0 to 100."""
    axes.figure.colorbar(ScalarMappable(SCALE, COLOUR_MAP), cax=axes, ticks=range(0, 101, 20))
    axes.tick_params(labelsize=8)


def draw_cells(axes: Axes, cells: NDArray[np.float64], columns: Sequence[str], rows: Sequence[str]) -> None:
    """Numbers from 0 to 100 as a heat map with the number in each cell; NaN is left blank."""
    axes.imshow(np.ma.masked_invalid(cells), cmap=COLOUR_MAP, norm=SCALE, aspect="auto")
    _draw_gaps(axes, cells.shape)
    for (i, j), value in np.ndenumerate(cells):
        if not np.isnan(value):
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=_ink(value), fontsize=8)
    below = short_names(columns)
    axes.set_xticks(range(len(below)), below, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(len(rows)), short_names(rows), fontsize=8)
    axes.spines[:].set_visible(False)


def _draw_gaps(axes: Axes, shape: tuple[int, ...]) -> None:
    """White lines between the cells, as the grid of the minor ticks."""
    axes.set_xticks(np.arange(shape[1] - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(shape[0] - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)


def _headline(result: Tree) -> str:
    known = {title: metric_of(result, name) for title, name in (("AP", "ap"), ("F.Ra", "f_ra"))}
    numbers = [f"{title} {value:.1f}" for title, value in known.items() if value is not None]
    return f"{title_of(result)}\n{'   '.join(numbers)}"


def _ink(value: float) -> str:
    """Black on light cells, white on dark ones, by the relative luminance of the cell."""
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
