"""Figures: which side of a target is right, and how a report is shown."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.figures import Figure, Report, machine, measured, number, table


@pytest.mark.parametrize(
    ("figure", "ok"),
    [
        (Figure("a", 1.1, target=1.1), True),
        (Figure("a", 1.11, target=1.1), False),
        (Figure("a", 5.0, target=4.0, direction=">="), True),
        (Figure("a", 3.9, target=4.0, direction=">="), False),
        (Figure("a", math.nan, target=1.0), False),
        (Figure("a", math.nan, target=1.0, direction=">="), False),
        (Figure("a", 7.0), None),
    ],
)
def test_a_figure_is_compared_with_its_target(figure: Figure, ok: bool | None) -> None:
    assert figure.ok is ok


def report(*figures: Figure) -> Report:
    return Report("stream", {"rows": 8}, figures, machine(0.5), ["mini-t5 left out"])


def test_settings_that_are_paths_are_written_too() -> None:
    options = Namespace(dir=Path("folder"), rows=8, other=1)
    tree = measured("bank", options, ("dir", "rows"), lambda: [Figure("time", 2.0, "s")]).tree()
    assert json.loads(json.dumps(tree))["settings"] == {"dir": "folder", "rows": 8}


def test_only_missed_targets_count_as_missed() -> None:
    result = report(Figure("fast", 1.0, target=1.1), Figure("slow", 2.0, target=1.1), Figure("told", 9.0))
    assert result.missed == ["slow"]


def test_the_table_shows_value_target_and_result_of_each_figure() -> None:
    lines = table(report(Figure("time", 1.2345, "x", 1.1, detail="2 ms against 1 ms"), Figure("speed", 12345.6, "/s")))
    shown = {line.split()[0]: line.split() for line in lines.splitlines() if line.strip()}
    assert shown["time"] == ["time", "1.234", "x", "<=", "1.1", "x", "MISSED", "2", "ms", "against", "1", "ms"]
    assert shown["speed"] == ["speed", "12,346", "/s"]
    assert "rows 8" in lines and "load" in lines and "note: mini-t5 left out" in lines


def test_the_tree_is_json_with_results() -> None:
    tree = json.loads(json.dumps(report(Figure("time", 2.0, "x", 1.1)).tree()))
    assert tree["missed"] == ["time"]
    assert tree["figures"][0]["ok"] is False and tree["figures"][0]["target"] == 1.1
    assert tree["machine"]["load"][0] == 0.5 and "torch" in tree["machine"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.4, "1,234"), (56.74, "56.7"), (20.0, "20"), (1.05, "1.05"), (0.0, "0"), (1e-4, "1e-04"), (math.inf, "inf")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
