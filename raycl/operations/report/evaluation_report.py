"""An evaluation of files as a table, and the confusion of its labels as a picture."""

from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from raycl.config import Tree
from raycl.errors import DataError
from raycl.operations.report.plots import axes_at, draw_cells, new_figure, save_png
from raycl.operations.report.tables import NOTHING
from raycl.text_tables import edgeless, render

LISTED = 20
"""Labels in the table and the picture; the most frequent ones."""


def evaluation_table(tree: Tree) -> str:
    """Return the score, tasks that answered, and precision, recall, F1, rows and frequent mistake of each label."""
    score = tree["score"]
    blocks: list[RenderableType] = [Text(f"{tree['metric']} {score['value']:.1f}   ({score['count']:,} rows)")]
    if tree["alone"]:
        how = f"the above is with the task's instruction; without it, by the text alone: {tree['alone']['value']:.1f}"
        blocks.append(Text(how))
    if tree["tasks"]:
        shares = ", ".join(f"{task} {100 * share:.1f}" for task, share in tree["tasks"].items() if share >= 0.0005)
        blocks.append(Text(f"mean weight of tasks, in percent: {shares}"))
    if tree["mean_ood_score"] is not None:
        blocks.append(Text(f"mean out-of-distribution score: {tree['mean_ood_score']:.3f}"))
    if tree["labels"]:
        table = edgeless(("label", "precision", "recall", "F1", "rows", "most often taken for"), words=(0, 5))
        for index, label in enumerate(tree["labels"][:LISTED]):
            scores, counts = tree["by_label"][label], list(tree["confusion"][index])
            counts[index] = 0
            worst = int(np.argmax(counts))
            mistake = f"{tree['labels'][worst]} ({counts[worst]:,})" if counts[worst] else NOTHING
            values = [f"{100 * scores[key]:.1f}" for key in ("precision", "recall", "f1-score")]
            table.add_row(label, *values, f"{int(scores['support']):,}", mistake)
        blocks.append(table)
        if len(tree["labels"]) > LISTED:
            blocks.append(Text(f"and {len(tree['labels']) - LISTED} more labels"))
    return render(Group(*blocks))


def ability_table(tree: Tree) -> str:
    """Return general ability of a backbone and of a snapshot by task: the score of each, and the difference."""
    table = edgeless(("general ability", "rows", "backbone", "snapshot", "delta", "unknown, %"))
    ends = [[cells[name]["value"] for name in tree["before"]] for cells in (tree["before"], tree["after"])]
    for name, before, after in zip(tree["before"], *ends, strict=True):
        cell = tree["after"][name]
        share = cell["extra"].get("unknown")
        unknown = NOTHING if share is None else f"{100 * share:.1f}"
        table.add_row(name, f"{cell['count']:,}", f"{before:.1f}", f"{after:.1f}", f"{after - before:+z.1f}", unknown)
    was, now = map(fmean, ends)
    table.add_row("mean", "", f"{was:.1f}", f"{now:.1f}", f"{now - was:+z.1f}", "")
    return render(table)


def confusion_png(tree: Tree, path: str | Path) -> Path:
    """Return percent of each true label's rows by predicted label.

    Raises:
        DataError: the answers are no labels.
    """
    labels = tree["labels"][:LISTED]
    if not labels:
        raise DataError("the backbone's answers are texts, not labels: there is no confusion to draw, leave --png out")
    rows = [index for index, row in enumerate(tree["confusion"][: len(labels)]) if sum(row)]
    counts = np.array([tree["confusion"][index] for index in rows], dtype=np.float64)
    cells = 100 * counts[:, : len(labels)] / counts.sum(1, keepdims=True)
    width, height = 0.6 * len(labels), 0.6 * len(rows)
    figure = new_figure(width + 2.4, height + 2.0)
    axes = axes_at(figure, 1.8, width, height, 0.3)
    draw_cells(axes, cells, labels, [labels[index] for index in rows])
    axes.set_xlabel("predicted label")
    axes.set_ylabel("true label (percent of its rows)")
    return save_png(figure, path)
