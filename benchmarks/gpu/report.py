"""The figures of a run of the suite as a page in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any

from benchmarks.figures import Figure, cells

COMMAND = "python jobs/benchmark.py gpu --json docs/gpu.json"
HEAD = f"""# Measured on a GPU

Made by `{COMMAND}` and `python jobs/benchmark.py gpu --report docs/gpu.md`.
Ratios are medians over rounds in which the contenders take turns.
Weights are random, and results are checked in the same run.
"""

NONE = """There are no figures yet: the suite has not run on a GPU. It needs about 10 minutes of one.
Until then its targets are estimates.
"""


def markdown(tree: Mapping[str, Any] | None) -> str:
    """Return the page; with a note where there are no figures yet.

    Args:
        tree: content of `--json` (`benchmarks.figures.Report.tree`).
    """
    if tree is None:
        return f"{HEAD}\n{NONE}"
    machine = ", ".join(f"{name} {value}" for name, value in tree["machine"].items())
    settings = ", ".join(f"{name} {value}" for name, value in tree["settings"].items())
    missed = [f"- {name}" for name in tree["missed"]] or ["- none"]
    lines = [HEAD, f"Machine: {machine}.\n", f"Settings: {settings}.\n", "Targets missed:\n", *missed, ""]
    for part, rows in groupby(map(_figure, tree["figures"]), key=lambda figure: figure.name.partition(",")[0]):
        lines += [f"## {part}\n", "| what | measured | target | kept | made from |", "|---|---:|---:|---|---|"]
        for figure in rows:
            name = figure.name.partition(", ")[2] or figure.name
            lines.append("| " + " | ".join(text.replace("|", "\\|") for text in (name, *cells(figure))) + " |")
        lines.append("")
    lines += [f"- {note}" for note in tree["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _figure(tree: Mapping[str, Any]) -> Figure:
    known = {field.name for field in fields(Figure)}
    values = {name: value for name, value in tree.items() if name in known}
    spread, value = values.get("spread"), values["value"]
    whole = {"spread": None if spread is None else tuple(spread), "value": float("nan") if value is None else value}
    return Figure(**{**values, **whole})
