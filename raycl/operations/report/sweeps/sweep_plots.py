"""Pictures of a sweep: which settings go with which scores, how far each setting matters, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from raycl.config import Tree
from raycl.operations.report.plots import COLOUR_MAP, COLOURS, new_figure
from raycl.operations.report.sweeps.sweep_tables import last_parts, text

PANEL, HEIGHT = 3.2, 3.0
"""Inches of one setting's panel."""

KINDS = 6
"""Up to this many words have a line each."""

NOMINAL = {"seed"}
"""Settings whose numbers are names: nothing lies between two of them."""

BAND, NEAR, STEP = 0.06, 0.01, 0.018
"""Shares of an axis: how far trials of one value are spread, which scores look alike, and how far those are apart."""

LOG_FROM = 20
"""Positive numbers are drawn on a logarithmic axis where the largest is more than so many times the smallest."""


def figures_of(summary: Tree) -> dict[str, Figure]:
    """Return the pictures of a sweep of which a trial is done and has all scores, by the names of their files."""
    figures = {"parallel.png": parallel_figure(summary), "sensitivity.png": sensitivity_figure(summary)}
    return figures if len(summary["metric"]) < 2 else {**figures, "pareto.png": pareto_figure(summary)}


def parallel_figure(summary: Tree) -> Figure:
    """Return every finished trial as a line over its settings and scores, coloured by the first metric."""
    rows = done_rows(summary)
    paths, same = varied(summary["paths"], rows)
    titles = [*map(last_parts, paths), *summary["metric"]]
    columns = [column_of([row["settings"].get(setting_path) for row in rows]) for setting_path in paths]
    columns += [column_of([row["scores"][index] for row in rows]) for index in range(len(summary["metric"]))]
    figure = new_figure(max(5.0, 1.7 * len(columns)), 4.2)
    axes = figure.subplots()
    scores = [row["scores"][0] for row in rows]
    colour = Normalize(min(scores), max(scores) if max(scores) > min(scores) else min(scores) + 1)
    for index in sorted(range(len(rows)), key=lambda index: scores[index]):
        points = [heights[index] for heights, _ in columns]
        axes.plot(points, color=colormaps[COLOUR_MAP](colour(scores[index])), linewidth=1.4, alpha=0.85)
    for index, (_, ticks) in enumerate(columns):
        axes.axvline(index, color="0.7", linewidth=0.8, zorder=0)
        for height, name in ticks:
            axes.text(index + 0.03, height, name, fontsize=7, va="center")
    axes.set_xticks(range(len(columns)), titles, fontsize=8, rotation=15)
    axes.set_yticks([])
    axes.set_ylim(-0.06, 1.06)
    axes.spines[["left", "right", "top", "bottom"]].set_visible(False)
    figure.colorbar(ScalarMappable(colour, COLOUR_MAP), ax=axes, label=summary["metric"][0])
    _note(figure, same)
    return figure


def sensitivity_figure(summary: Tree) -> Figure:
    """Return the first metric over each setting: a point a trial, a line through the means of equal values.

    Words, and numbers that are names (seeds), have a dash at each mean and no line. Where one setting takes a few words
    (method: lora, olora), settings of numbers have a line for each of them.
    """
    rows = done_rows(summary)
    paths, same = varied(summary["paths"], rows)
    figure = new_figure(PANEL * len(paths) + 0.6, HEIGHT)
    panels = figure.subplots(1, len(paths), sharey=True, squeeze=False)[0]
    kinds = kinds_of(paths, rows)
    for axes, setting_path in zip(panels, paths, strict=True):
        values = [row["settings"].get(setting_path) for row in rows]
        if setting_path in NOMINAL:
            values = list(map(text, values))
        draw_setting(axes, values, [row["scores"][0] for row in rows], kinds if is_numeric(values) else None)
        axes.set_xlabel(last_parts(setting_path), fontsize=9)
    panels[0].set_ylabel(summary["metric"][0], fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.94) if same else None)
    _note(figure, same)
    return figure


def pareto_figure(summary: Tree) -> Figure:
    """Return the first two metrics against each other, the front joined by a line."""
    rows = done_rows(summary)
    figure = new_figure(4.6, 4.0)
    axes = figure.subplots()
    axes.scatter(
        [row["scores"][0] for row in rows], [row["scores"][1] for row in rows], color=COLOURS[5], s=22, label="trials"
    )
    front = sorted((row for row in rows if row["number"] in summary["front"]), key=lambda row: row["scores"][0])
    ends = [row["scores"][0] for row in front], [row["scores"][1] for row in front]
    axes.plot(*ends, color=COLOURS[1], marker="o", markersize=5, label="Pareto front")
    for others, is_front in ((rows, False), (front, True)):
        by_point: dict[tuple[float, float], list[int]] = {}
        for row in (row for row in others if (row in front) == is_front):
            by_point.setdefault((row["scores"][0], row["scores"][1]), []).append(row["number"])
        for point, numbers in by_point.items():
            named = ", ".join(str(number + 1) for number in numbers) if is_front else f"x {len(numbers)}"
            if is_front or len(numbers) > 1:
                axes.annotate(named, point, textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set_xlabel(f"{summary['metric'][0]} ({summary['mode'][0]})", fontsize=9)
    axes.set_ylabel(f"{summary['metric'][1]} ({summary['mode'][1]})", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return figure


def done_rows(summary: Tree) -> list[Tree]:
    """Return trials that are done and have all scores."""
    return [row for row in summary["rows"] if row["state"] == "done" and None not in row["scores"]]


def varied(paths: Sequence[str], rows: Sequence[Tree]) -> tuple[list[str], list[str]]:
    """Return settings that differ between trials (all, if none does), and in words those that do not."""
    values_by_path = {path: {text(row["settings"].get(path)) for row in rows} for path in paths}
    different = [path for path in paths if len(values_by_path[path]) > 1]
    if not different:
        return list(paths), []
    return different, [
        f"{last_parts(path)} {next(iter(values_by_path[path]))}" for path in paths if path not in different
    ]


def _note(figure: Figure, same: Sequence[str]) -> None:
    if same:
        figure.text(0.01, 0.99, f"the same in all trials: {', '.join(same)}", fontsize=7, color="0.4", va="top")


def column_of(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return an upright axis of the parallel coordinates: heights of the trials, 0 to 1, and ticks, height and name.

    Numbers stand by size (in the logarithm where they span much), anything else by first appearance; trials of one
    value side by side, so that none covers another.
    """
    if is_numeric(values):
        wide = is_wide(values)
        places = [math.log(value) if wide else float(value) for value in values]
        low, high = min(places), max(places)
        heights = [(position - low) / (high - low) if high > low else 0.5 for position in places]
        ticks: list[tuple[float, str]] = []
        for height, value in sorted(set(zip(heights, values, strict=True))):
            if not ticks or height - ticks[-1][0] >= 0.06:  # far enough apart for their names
                ticks.append((height, text(value)))
    else:
        names = list(dict.fromkeys(map(text, values)))
        step = 1 / max(1, len(names) - 1)
        heights = [names.index(text(value)) * step for value in values]
        ticks = [(position * step, name) for position, name in enumerate(names)]
    levels = sorted(set(heights))
    room = min([BAND, *(0.5 * (high - low) for low, high in pairwise(levels))])
    spread = list(heights)
    for level in levels:
        mine = [index for index, height in enumerate(heights) if height == level]
        for number, index in enumerate(mine[: None if len(mine) > 1 else 0]):
            spread[index] = level + room * (number / (len(mine) - 1) - 0.5)
    return spread, ticks


def kinds_of(paths: Sequence[str], rows: Sequence[Tree]) -> list[str] | None:
    """Return each trial's value of the first setting with between two and `KINDS` words; None: there is none."""
    for path in paths:
        values = [row["settings"].get(path) for row in rows]
        if all(isinstance(value, str) for value in values) and 2 <= len(set(values)) <= KINDS:
            return values
    return None


def is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def is_wide(values: Sequence[float]) -> bool:
    """Return whether the values are spread widely enough for a logarithmic axis."""
    return min(values) > 0 and max(values) > LOG_FROM * min(values)


def draw_setting(
    axes: Axes, values: Sequence[Any], scores: Sequence[float], kinds: Sequence[str] | None = None
) -> None:
    """Draw a panel of `sensitivity_figure`: points, and a line for each of the kinds, if there are any."""
    numeric = is_numeric(values)
    names = list(dict.fromkeys(map(text, values)))
    places = list(values) if numeric else [names.index(text(value)) for value in values]
    aside = _aside(places, scores, numeric and is_wide(values))
    scores_by_kind: dict[str, dict[float, list[float]]] = {}
    kind_of = kinds or [""] * len(scores)
    for kind, setting_value, score in zip(kind_of, places, scores, strict=True):
        scores_by_kind.setdefault(kind, {}).setdefault(setting_value, []).append(score)
    for number, (kind, by_place) in enumerate(scores_by_kind.items()):
        means = sorted((setting_value, fmean(some)) for setting_value, some in by_place.items())
        at, mean = zip(*means, strict=True)
        mine = [trial for trial, own in enumerate(kind_of) if own == kind]
        colour = COLOURS[number if kinds else 5]
        axes.scatter([aside[trial] for trial in mine], [scores[trial] for trial in mine], color=colour, s=16)
        if numeric:
            axes.plot(at, mean, color=COLOURS[number], linewidth=1.4, label=kind or None)
        else:
            axes.scatter(at, mean, color=COLOURS[number], marker="_", s=220, linewidths=1.6, label="mean")
    if kinds:
        axes.legend(frameon=False, fontsize=7)
    if numeric and is_wide(values):
        axes.set_xscale("log")
    if not numeric:
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=7)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _aside(places: Sequence[float], scores: Sequence[float], wide: bool) -> list[float]:
    """Return positions of points, those of one value with similar scores spread around it; `wide`: on a log axis."""
    across = [math.log(position) if wide else float(position) for position in places]
    span, alike = max(across) - min(across) or 1.0, NEAR * (max(scores) - min(scores))
    gap = min((high - low for low, high in pairwise(sorted(set(across)))), default=span)
    groups: list[list[int]] = []
    for index in sorted(range(len(scores)), key=lambda index: (across[index], scores[index])):
        last = groups[-1][-1] if groups else index
        if groups and across[last] == across[index] and scores[index] - scores[last] <= alike:
            groups[-1].append(index)
        else:
            groups.append([index])
    spread = list(across)
    for group in groups:
        step = min(STEP * span, 0.6 * gap / len(group))
        for number, index in enumerate(group):
            spread[index] += step * (number - (len(group) - 1) / 2)
    return [math.exp(position) for position in spread] if wide else spread
