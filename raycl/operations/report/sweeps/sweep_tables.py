"""Tables of a sweep: its trials, the best first, means over seeds or orders, and the same as CSV."""

import json
from collections.abc import Collection
from typing import Any

from rich.text import Text

from raycl.config import Tree
from raycl.data.sources.table_cells import spreadsheet
from raycl.operations.report.tables import Page
from raycl.text_tables import grid


def sweep_table(summary: Tree) -> Page:
    """Return a table with a line for each trial, best first; several metrics: the Pareto front is marked."""
    paths = summary["paths"]
    titles = ["trial", *map(last_parts, paths), "tasks", *summary["metric"], "AP", "F.Ra", "s", ""]
    table = grid(titles, left=1 + len(paths), heading=f"{summary['name']}")
    table.columns[0].justify = "right"
    equal = _equal(summary)
    for row in summary["rows"]:
        mark = _mark(row, summary, equal)
        cells = [text(row["settings"].get(path)) for path in paths]
        scores = [number(value) for value in row["scores"]] or [""] * len(summary["metric"])
        known = [number(row["numbers"].get(name)) for name in ("ap", "f_ra")]
        learned = f"{row['tasks']}/{summary['tasks']}" + (f" ({row['forked_tasks']})" if row["forked_tasks"] else "")
        table.add_row(str(row["number"] + 1), *cells, learned, *scores, *known, f"{row['train_s']:.0f}", mark)
    note = "tasks: learned/all (of these, learned by another trial); s: training time of the trial's own workers"
    if equal:
        note += f"\nequal: all of these score best; best.yaml has trial {summary['best'] + 1}, the first of them"
    return Page(table, Text(note))


def group_table(summary: Tree) -> Page:
    """Return a table with a line for all trials that differ in `over` alone: mean and standard deviation."""
    paths = [path for path in summary["paths"] if path not in summary["over"]]
    heading = f"{summary['name']}, over {', '.join(summary['over'])}"
    table = grid([*map(last_parts, paths), "trials", *summary["metric"]], left=len(paths), heading=heading)
    for group in summary["groups"]:
        cells = [text(group["settings"].get(path)) for path in paths]
        pairs = zip(group["means"], group["spreads"], strict=True)
        count, done = len(group["numbers"]), group["done"]
        trials = str(count) if done == count else f"{done} of {count}"
        table.add_row(*cells, trials, *[_spread(mean, spread) for mean, spread in pairs])
    return Page(table)


def sweep_csv(summary: Tree) -> str:
    """Return all trials in full precision; lists and mappings as JSON."""
    numbers = [name for name in ("ap", "f_ra", "bwt", "fwt") if name not in summary["metric"]]
    columns = ("tasks", "forked_tasks", "train_s", "wall_s", "error")
    lines: list[list[Any]] = [["trial", "state", *summary["paths"], *summary["metric"], *numbers, *columns]]
    for row in summary["rows"]:
        settings = [row["settings"].get(path) for path in summary["paths"]]
        cells = [value if isinstance(value, str | int | float | None) else json.dumps(value) for value in settings]
        scores = row["scores"] or [None] * len(summary["metric"])
        known = [row["numbers"].get(name) for name in numbers]
        lines.append([row["number"] + 1, row["state"], *cells, *scores, *known, *[row[name] for name in columns]])
    return spreadsheet(lines)


def text(value: Any) -> str:
    """Return a setting in a cell or at an axis: short, equal for equal values."""
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict) and "name" in value:
        rest = ", ".join(f"{key}={text(part)}" for key, part in value.items() if key != "name")
        return f"{value['name']} ({rest})" if rest else str(value["name"])
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ">".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def number(value: float | None) -> str:
    """Return a score."""
    return "–" if value is None else f"{value:.2f}"


def _equal(summary: Tree) -> list[int]:
    """Return the trials that share the best score, or the best mean; none where one has it alone."""
    if summary["best"] is None or len(summary["metric"]) > 1:
        return []
    best = next(group["means"] for group in summary["groups"] if summary["best"] in group["numbers"])
    groups = [group["numbers"] for group in summary["groups"] if group["means"] == best]
    return [number for numbers in groups for number in numbers] if len(groups) > 1 else []


def _mark(row: Tree, summary: Tree, equal: Collection[int]) -> str:
    if row["state"] != "done":
        return str(row["state"])
    if len(summary["metric"]) > 1:
        return "front" if row["number"] in summary["front"] else ""
    if row["number"] in equal:
        return "equal"
    return "best" if row["number"] == summary["best"] else ""


def _spread(mean: float | None, spread: float | None) -> str:
    return number(mean) if spread is None else f"{number(mean)} ± {spread:.2f}"


def last_parts(path: str) -> str:
    """Return the last two parts of a dotted path, for a table."""
    return ".".join(path.split(".")[-2:])
