"""Plots of routers: similarity of the keys, where they lie in the plane, the weight of texts on their own task.

Two tasks whose keys are confused are seen at a glance, in three panels that share one order of tasks.

Colours as in `plots`. In the plane neighbouring tasks differ in colour and in marker; no pair comes twice in 56 tasks.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from raycl.config import Tree
from raycl.errors import RunError
from raycl.metrics.run_results import short_names
from raycl.operations.report.phase_summaries import KINDS, Point, RouterSummary, mean_of
from raycl.operations.report.plots import (
    CELL_HEIGHT,
    CELL_WIDTH,
    COLOUR_MAP,
    COLOURS,
    MARGIN,
    arranged,
    axes_at,
    draw_cells,
    draw_scale,
    new_figure,
)
from raycl.operations.report.run_comparison import labels

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

BAR_COLOURS = {"keys": COLOURS[0], "discriminant": COLOURS[4], "eq13": COLOURS[6]}
"""Blue, orange, black: also apart in grey."""
MOST_RUNS, MOST_TASKS = 6, 100
TASK_HEIGHT, LEAST_HEIGHT = 0.26, 3.2
"""Inches of a task's row, and of a panel with few tasks."""
NUMBERED_HEIGHT = 0.5
"""Inches of a task's row from which each bar has room for its number."""
BARELESS = "0.0 of its dev texts"
"""The text next to bars of length 0, which have no room for their numbers."""
BARS_WIDTH, LEGEND_WIDTH, SCALE_WIDTH, TEXTS_SIZE = 3.6, 1.5, 0.9, 4.0
OOD_WIDTH, TITLE_LETTERS = 1.65, 34
"""Inches of a panel of scores, which a phone shows whole, and letters of a line of its title."""
ABOVE, BELOW = 0.9, 1.2
"""Inches above the panels of a run for titles, and below them for names and legends."""


def look_of(number: int) -> dict[str, Any]:
    """Return colour and marker of one of several tasks or runs, by its number."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def router_figure(results: Sequence[Tree]) -> Figure:
    """Return one row of panels per run: cosines of keys, t-SNE of keys, tasks found by each router.

    Raises:
        RunError: no results, more than `MOST_RUNS`, or one with more than `MOST_TASKS` tasks.
    """
    if not results:
        raise RunError("none of these runs has a router to draw: expected runs of slm, sapt or the like")
    if len(results) > MOST_RUNS:
        raise RunError(f"a picture of {len(results)} routers cannot be read: give between 1 and {MOST_RUNS} runs")
    routings = [RouterSummary.of(result) for result in results]
    most = max(len(routing.tasks) for routing in routings)
    if most > MOST_TASKS:
        raise RunError(f"a picture of a router over {most} tasks cannot be read: give runs of at most {MOST_TASKS}")
    sizes = [max(LEAST_HEIGHT, TASK_HEIGHT * len(routing.tasks)) for routing in routings]
    columns = (MARGIN, MARGIN + max(sizes) + SCALE_WIDTH, 2 * (MARGIN + max(sizes)) + SCALE_WIDTH + LEGEND_WIDTH)
    figure = new_figure(columns[2] + BARS_WIDTH + 0.5, sum(sizes) + (ABOVE + BELOW) * len(sizes))
    width, height = figure.get_size_inches()
    lowest = min((value for routing in routings for row in routing.cosines for value in row), default=0.0)
    scale = Normalize(min(0.0, np.floor(lowest * 10) / 10), 1)
    top = 0.0
    for title, routing, size in zip(labels(results), routings, sizes, strict=True):
        top += ABOVE
        figure.text(columns[0] / width, 1 - (top - 0.5) / height, title, fontsize=10, fontweight="bold", va="bottom")
        _draw_cosines(axes_at(figure, columns[0], size, size, top), routing, scale)
        bar = axes_at(figure, columns[0] + size + 0.15, 0.12, size, top)
        figure.colorbar(ScalarMappable(scale, COLOUR_MAP), cax=bar).ax.tick_params(labelsize=8)
        keys = "keys of all groups in the plane (t-SNE by cosine)"
        _draw_plane(axes_at(figure, columns[1], size, size, top), routing.tasks, routing.points, keys)
        _draw_own_shares(axes_at(figure, columns[2], BARS_WIDTH, size, top), routing, size)
        top += size + BELOW
    return figure


def confusion_figure(results: Sequence[Tree]) -> Figure:
    """Return one heat map per run: percent of the weight of each task's dev texts that its router gives each task."""
    routings = [RouterSummary.of(result) for result in results]
    sizes = [(CELL_WIDTH * len(routing.tasks), CELL_HEIGHT * len(routing.confused)) for routing in routings]
    width = max(width for width, _ in sizes)
    figure = new_figure(MARGIN + width + 1.0, sum(height + ABOVE + BELOW for _, height in sizes))
    top = 0.0
    for title, routing, (run_width, height) in zip(labels(results), routings, sizes, strict=True):
        top += ABOVE
        axes = axes_at(figure, MARGIN, run_width, height, top)
        draw_cells(axes, np.array(list(routing.confused.values())), routing.tasks, list(routing.confused))
        axes.set_title(f"{title}\nweight on the adapters of", fontsize=9, loc="left")
        axes.set_ylabel("dev texts of", fontsize=9)
        draw_scale(axes_at(figure, MARGIN + run_width + 0.2, 0.12, height, top))
        top += height + BELOW
    return figure


def texts_figure(results: Sequence[Tree]) -> Figure:
    """Return one map per run: where dev texts lie by the embeddings that the router reads."""
    routings = [RouterSummary.of(result) for result in results]
    figure = new_figure(MARGIN + TEXTS_SIZE + LEGEND_WIDTH, (ABOVE + TEXTS_SIZE + 0.2) * len(results))
    for number, (title, routing) in enumerate(zip(labels(results), routings, strict=True)):
        axes = axes_at(figure, MARGIN, TEXTS_SIZE, TEXTS_SIZE, (ABOVE + TEXTS_SIZE + 0.2) * number + ABOVE)
        _draw_plane(axes, routing.tasks, routing.texts, f"{title}\ndev texts in the plane (t-SNE by cosine)")
    return figure


def ood_figure(results: Sequence[Tree]) -> Figure:
    """Return a panel for each run: quantiles of the out-of-distribution scores of each task's dev texts."""
    routings = [RouterSummary.of(result) for result in results]
    heights = [max(1.0, NUMBERED_HEIGHT * len(routing.rated)) for routing in routings]
    rooms = [(MARGIN + OOD_WIDTH + 0.3, ABOVE + height + BELOW) for height in heights]
    figure, corners = arranged(rooms)
    for title, routing, (left, top), height in zip(labels(results), routings, corners, heights, strict=True):
        axes = axes_at(figure, left + MARGIN, OOD_WIDTH, height, top + ABOVE)
        _draw_scores(axes, routing)
        axes.set_title(textwrap.fill(title, TITLE_LETTERS), fontsize=9, loc="left", x=-0.5)
    return figure


def _draw_scores(axes: Axes, routing: RouterSummary) -> None:
    """Draw for each task a line from 5 to 95 percent, thick from 25 to 75, with a mark at the median."""
    tasks = routing.rated
    parts = (("learned", routing.learned, COLOURS[0], "o"), ("before it was learned", routing.outside, COLOURS[1], "D"))
    for place, (title, scores, colour, marker) in enumerate(parts):
        for number, task in enumerate(tasks):
            if task in scores:
                low, lower, median, upper, high = scores[task]
                row = number + 0.36 * (place - 0.5)
                axes.plot((low, high), (row, row), color=colour, linewidth=1)
                axes.plot((lower, upper), (row, row), color=colour, linewidth=8, solid_capstyle="butt")
                axes.plot(median, row, marker, color=colour, markersize=5, markeredgecolor="white", label=title)
                title = ""
    means = [
        (routing.novelty[task] / 100, number + 0.18) for number, task in enumerate(tasks) if task in routing.novelty
    ]
    if means:
        axes.plot(*zip(*means, strict=True), "x", color="black", markersize=5, label="mean before it was learned")
    if routing.threshold is not None:
        label = f"threshold ({routing.false_alarms:g} false alarms)"
        axes.axvline(routing.threshold, color="black", linewidth=1, linestyle="--", label=label)
    axes.set_yticks(range(len(tasks)), short_names(tasks), fontsize=8)
    axes.set(xlim=(-0.03, 1.03), ylim=(len(tasks) - 0.5, -0.5))
    axes.set_xlabel("out-of-distribution score", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    below = -0.5 / (axes.bbox.height / axes.figure.dpi)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.5, below), frameon=False, fontsize=8)


def _draw_cosines(axes: Axes, routing: RouterSummary, scale: Normalize) -> None:
    """Draw slots in order of learning, a white line where the task changes, and its name at the middle of its slots."""
    cells = np.array(routing.cosines, dtype=float).reshape(len(routing.owners), -1)
    axes.imshow(cells, cmap=COLOUR_MAP, norm=scale, aspect="auto", interpolation="nearest")
    tasks = list(dict.fromkeys(routing.owners))
    places = [np.flatnonzero([owner == task for owner in routing.owners]) for task in tasks]
    borders = [float(position[-1]) + 0.5 for position in places[:-1]]
    for border in borders:
        axes.axhline(border, color="white", linewidth=1)
        axes.axvline(border, color="white", linewidth=1)
    middles, names = [float(position.mean()) for position in places], short_names(tasks)
    axes.set_xticks(middles, names, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(middles, names, fontsize=8)
    axes.tick_params(length=0)
    what = "slots" if len(tasks) < len(routing.owners) else "tasks"
    axes.set_title(f"cosine of the keys of two {what}, mean over groups", fontsize=9, loc="left")
    axes.spines[:].set_visible(False)


def _draw_plane(axes: Axes, tasks: Sequence[str], points: Sequence[Point], title: str) -> None:
    for number, (task, name) in enumerate(zip(tasks, short_names(tasks), strict=True)):
        mine = [point for point in points if point.task == task]
        if mine:
            axes.scatter(
                [point.x for point in mine],
                [point.y for point in mine],
                s=22,
                **look_of(number),
                edgecolors="white",
                linewidths=0.4,
                label=name,
            )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=9, loc="left")
    if points:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8, handletextpad=0.3)
    else:
        axes.text(0.5, 0.5, "left out: too few keys, or too many", ha="center", fontsize=9, transform=axes.transAxes)


def _draw_own_shares(axes: Axes, routing: RouterSummary, size: float) -> None:
    """Draw for each task a bar per kind, the first task on top, with numbers where there is room."""
    count = len(routing.tasks)
    thick = 0.8 / len(KINDS)
    for number, (kind, title) in enumerate(KINDS.items()):
        shares = [routing.own_shares[kind].get(task, np.nan) for task in routing.tasks]
        places = np.arange(count) + (number - (len(KINDS) - 1) / 2) * thick
        mean, used = mean_of(routing.own_shares[kind]), " (in use)" if kind == routing.used else ""
        label = f"{title}{used}" if mean is None else f"{title}{used}: mean {mean:.1f}"
        bars = axes.barh(places, shares, 0.9 * thick, color=BAR_COLOURS[kind], label=label)
        if size / count >= NUMBERED_HEIGHT:
            numbers = ["" if np.isnan(share) else f"{share:.1f}" for share in shares]
            axes.bar_label(bars, labels=numbers, fontsize=7, padding=2)
    for index, task in enumerate(routing.tasks):
        shares = [routing.own_shares[kind][task] for kind in KINDS if task in routing.own_shares[kind]]
        blank = "no dev texts" if not shares else "" if max(shares) or size / count >= NUMBERED_HEIGHT else BARELESS
        axes.text(1, index, blank, fontsize=7, va="center", color="0.4")
    axes.set_yticks(range(count), short_names(routing.tasks), fontsize=8)
    axes.set(xlim=(0, 100), ylim=(count - 0.5, -0.5))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("weight of dev texts on their own task, in percent", fontsize=9, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.25 / size), frameon=False, fontsize=8)
