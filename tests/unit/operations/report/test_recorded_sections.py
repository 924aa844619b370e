"""Pages about recorded runs: the same numbers and verdicts as those of the runs, and what is no such file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycl.cli.main import main
from raycl.errors import RunError
from raycl.operations.report.page.recorded_sections import recorded_sections, recorded_verdicts
from raycl.operations.report.recorded_runs import RecordedRuns
from raycl.operations.report.run_comparison import compare, runs_to_csv

Make = Callable[..., dict[str, Any]]


def runs(make: Make, stream: str) -> list[dict[str, Any]]:
    """Return two methods with two seeds each, the first better on every task, and one that learns each task alone."""
    results = []
    for method, lower in (("slm", 0.0), ("lora", 20.0)):
        for seed in (0, 1):
            result = make(method, seed, ap=80.0 - lower + seed)
            for cell in result["matrix"][-1]:
                cell["value"] += seed - lower
            results.append(result)
    results.append(copy.deepcopy(results[0]))
    results[-1]["config"]["stream"]["schedule"] = "separate"
    for result, name in zip(results, ("slm-s0", "slm-s1", "lora-s0", "lora-s1", "separate-slm-s0"), strict=True):
        result["config"]["output"] = {"name": name}
        result["stream"]["name"] = result["config"]["stream"]["name"] = stream
    return results


def recorded(results: list[dict[str, Any]], file: Path) -> RecordedRuns:
    file.write_text(runs_to_csv(results), encoding="utf-8")
    return RecordedRuns(file)


def test_lines_are_those_of_the_runs(make_result: Make, tmp_path: Path) -> None:
    results = runs(make_result, "a")
    study = recorded(results, tmp_path / "a.csv")
    by_row = {line.method: line for line in study.lines()}
    assert list(by_row) == ["slm", "lora", "separate-slm"] and study.competing() == ["slm", "lora"]
    for line in compare(results):
        row = by_row["separate-slm" if "separate" in line.method else line.method]
        assert row.runs == line.runs and row.numbers == {name: line.numbers[name] for name in row.numbers}


def test_a_page_has_the_files_side_by_side_and_each_alone(make_result: Make, tmp_path: Path) -> None:
    studies = [recorded(runs(make_result, name), tmp_path / f"{name}.csv") for name in ("a", "b")]
    titles = [section.title for section in recorded_sections(studies)]
    assert titles[:4] == [
        "AP on each stream",
        "Comparison: a, mini-t5",
        "Verdicts: a, mini-t5",
        "Scores of tasks: a, mini-t5",
    ]
    assert "AP on each stream" not in [section.title for section in recorded_sections(studies[:1])]
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--html", str(page), "--quiet"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "AP on each stream" in text and text.count("<td>separate-slm</td>") >= 4


def test_verdicts_follow_the_numbers(make_result: Make, tmp_path: Path) -> None:
    results = runs(make_result, "a")
    (verdict,) = recorded_verdicts(recorded(results, tmp_path / "a.csv"))
    assert (verdict.first, verdict.second, verdict.word) == ("lora", "slm", "worse")
    for result in results[2:4]:
        for cell in result["matrix"][-1]:
            cell["value"] += 19.0
    (verdict,) = recorded_verdicts(recorded(results, tmp_path / "a.csv"), "slm")
    assert verdict.difference is not None and verdict.difference.mean == pytest.approx(-1.0)


def test_other_files_and_names_are_refused(
    make_result: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.csv"
    study = recorded(runs(make_result, "a"), file)
    with pytest.raises(RunError, match="no row of these runs is named 'ewc': expected one of slm, lora, separate-slm"):
        recorded_sections([study], "ewc")
    assert main(["report", str(file), "--png", "m.png"]) != 0
    assert "has the numbers of runs alone, and --png needs their folders" in capsys.readouterr().err
    assert main(["report", str(file), str(tmp_path)]) != 0
    lines = file.read_text(encoding="utf-8").splitlines()
    damage = {
        "lacks run": ["name" + lines[0][3:], *lines[1:]],
        "has two lines of run 'slm-s0', seed 0": [*lines, lines[1]],
        "has no runs": lines[:1],
        "ap of run 'slm-s0' is 'much', expected a number": [lines[0], lines[1].replace("80.0", "much", 1)],
        "of run 'slm-s0' is 'None', expected a number": [lines[0], lines[1][: len(lines[1]) // 2]],
    }
    for message, kept in damage.items():
        file.write_text("\n".join(kept), encoding="utf-8")
        with pytest.raises(RunError, match=message):
            RecordedRuns(file)
