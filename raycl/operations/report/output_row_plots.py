"""The overlap of tasks' large outputs as heat maps side by side, one for each model (MIGU's figures 5, 15 and 16)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raycl.errors import RunError
from raycl.operations.report.output_row_probe import ALL, Probes
from raycl.operations.report.plots import (
    CELL_HEIGHT,
    CELL_WIDTH,
    MARGIN,
    MOST_PANELS,
    axes_at,
    draw_cells,
    draw_scale,
    new_figure,
    save_png,
)

ABOVE, BELOW = 1.0, 1.1
"""Inches above a row of maps for titles, and below it for the names of tasks."""


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
    figure = new_figure(panel * most + 1.0, sum(heights) + (ABOVE + BELOW) * len(probes))
    width, height = figure.get_size_inches()
    top = 0.0
    for probe, count, tall in zip(probes, counts, heights, strict=True):
        top += ABOVE
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
        top += tall + BELOW
    return save_png(figure, path)
