"""Plots of attention: the adapters' weights for each task's texts when it was learned, and at the end.

As in SAPT's figure of its attention weights, two equal maps show a run that forgot no routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raycl.config import Tree
from raycl.errors import RunError
from raycl.operations.report.attention_tables import AttentionWeights
from raycl.operations.report.plots import (
    CELL_HEIGHT,
    CELL_WIDTH,
    MARGIN,
    axes_at,
    draw_cells,
    draw_scale,
    new_figure,
    save_png,
)
from raycl.operations.report.run_comparison import labels

MOST_RUNS, MOST_TASKS = 6, 40
ABOVE, BELOW = 0.6, 0.8
"""Inches above the maps of a run for titles, and below them for names."""


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
    figure = new_figure(second + max(*widths, 3.0) + 1.0, sum(heights) + (ABOVE + BELOW) * len(attention))
    top = 0.0
    for title, run, width, height in zip(labels(results), attention, widths, heights, strict=True):
        top += ABOVE
        maps = {f"{title}\nwhen it was learned": (MARGIN, run.train), "at the end (test texts)": (second, run.test)}
        for head, (left, weights) in maps.items():
            if not weights:
                continue
            axes = axes_at(figure, left, width, CELL_HEIGHT * len(weights), top)
            draw_cells(axes, 100 * np.array(list(weights.values())), run.keys, list(weights))
            axes.set_title(head, fontsize=9, loc="left")
            axes.set_ylabel("texts of", fontsize=9)
        draw_scale(axes_at(figure, second + width + 0.2, 0.12, height, top))
        top += height + BELOW
    return save_png(figure, path)
