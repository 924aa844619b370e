"""Pages about recorded runs: the same numbers and verdicts as those of the runs, and what is no such file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycl.cli.main import main
from raycl.errors import RunError
from raycl.metrics.run_results import FOLDER
from raycl.operations.report.page.recorded_sections import recorded_sections, studies_of
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
    files = [recorded(runs(make_result, name), tmp_path / f"{name}.csv") for name in ("a", "b")]
    titles = [section.title for section in recorded_sections(studies_of(files))]
    assert titles[:4] == [
        "AP on each stream",
        "Comparison: a, mini-t5",
        "Verdicts: a, mini-t5",
        "Scores of tasks: a, mini-t5",
    ]
    assert "AP on each stream" not in [section.title for section in recorded_sections(studies_of(files[:1]))]
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--html", str(page), "--quiet"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "AP on each stream" in text and text.count("<td>separate-slm</td>") >= 4


def test_published_numbers_stand_beside_recorded_ones(
    make_result: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the installed comparison that has the file's name."""
    for name in ("methods-long8", "other"):
        recorded(runs(make_result, "a"), tmp_path / f"{name}.csv")
        assert main(["report", str(tmp_path / f"{name}.csv")]) == 0
        shown = capsys.readouterr().out
        assert ("published: SAPT, table 1" in shown) == ("79.10" in shown) == (name == "methods-long8")


def test_verdicts_follow_the_numbers(make_result: Make, tmp_path: Path) -> None:
    results = runs(make_result, "a")
    (verdict,) = studies_of([recorded(results, tmp_path / "a.csv")])[0].verdicts
    assert (verdict.first, verdict.second, verdict.word) == ("lora", "slm", "worse")
    for result in results[2:4]:
        for cell in result["matrix"][-1]:
            cell["value"] += 19.0
    (verdict,) = studies_of([recorded(results, tmp_path / "a.csv")], "slm")[0].verdicts
    assert verdict.difference is not None and verdict.difference.mean == pytest.approx(-1.0)


def test_other_files_and_names_are_refused(
    make_result: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.csv"
    study = recorded(runs(make_result, "a"), file)
    with pytest.raises(RunError, match="no row of these runs is named 'ewc': expected one of slm, lora, separate-slm"):
        studies_of([study], "ewc")
    assert main(["report", str(file), "--png", "m.png"]) != 0
    assert "has the numbers of runs alone, and --png needs their folders" in capsys.readouterr().err
    assert main(["report", str(file), str(tmp_path)]) != 0
    assert main(["report", str(tmp_path / "none.csv")]) != 0
    assert "there is no file" in capsys.readouterr().err
    other = runs(make_result, "a")
    other[0]["stream"]["name"] = other[0]["config"]["stream"]["name"] = "b"
    with pytest.raises(RunError, match="has runs on a, mini-t5; b, mini-t5: expected one stream and backbone a file"):
        studies_of([recorded(other, file)])
    recorded(runs(make_result, "a"), file)
    lines = file.read_text(encoding="utf-8").splitlines()
    damage = {
        "lacks run": ["name" + lines[0][3:], *lines[1:]],
        "has two lines of run 'slm-s0', seed 0": [*lines, lines[1]],
        "has no runs": lines[:1],
        "ap of run 'slm-s0' is 'much', expected a number": [lines[0], lines[1].replace("80.0", "much", 1)],
        "the line of run 'slm-s0' has not as many cells as the head": [lines[0], lines[1].rpartition(",")[0]],
        "the line of run 'slm-s0' has not as many": [lines[0], f"{lines[1]},1"],
    }
    for message, kept in damage.items():
        file.write_text("\n".join(kept), encoding="utf-8")
        with pytest.raises(RunError, match=message):
            RecordedRuns(file)
    file.write_text("\n".join(lines).replace("slm", "é"), encoding="latin-1")
    with pytest.raises(RunError, match="is no CSV file in UTF-8"):
        RecordedRuns(file)
    file.write_text("\n".join(lines), encoding="utf-8-sig")
    assert RecordedRuns(file).tasks == study.tasks, "as Excel saves it"


def test_rows_have_the_names_of_their_runs(make_result: Make, tmp_path: Path) -> None:
    """A run without a name has that of its folder; what follows `-s` is a seed only where it is the run's."""
    results = runs(make_result, "a")[:4]
    for result, name in zip(results, ("my-slm", "my-slm-s1", "my-sapt", "my-sapt-s1"), strict=True):
        result["config"]["output"] = {"name": None}
        result[FOLDER] = f"/runs/{name}"
    assert list(recorded(results, tmp_path / "a.csv").runs) == ["my-slm", "my-sapt"]


def test_methods_of_other_tasks_and_of_no_training_do_not_compete(make_result: Make, tmp_path: Path) -> None:
    results = runs(make_result, "a")[:4]
    for result in results:
        result["untrained"] = {"cells": {}, "mean": 1.0, "unseen": None}
    study = recorded(results, tmp_path / "a.csv")
    assert study.competing() == ["slm", "lora"] and "untrained" in study.runs
    for seed in study.runs["lora"]:
        study.runs["lora"][seed]["score_agnews"] = ""
    (verdict,) = study.verdicts([("lora", "slm")])
    assert verdict.difference is None, "they have other tasks"


def test_files_without_what_a_section_shows_have_a_page_too(make_result: Make, tmp_path: Path) -> None:
    alone = recorded(runs(make_result, "a")[-1:], tmp_path / "alone.csv")
    (study,) = studies_of([alone])
    assert study.competing == [] and study.verdicts == [] and study.lines[0].method == "separate-slm"
    whole = recorded(runs(make_result, "b"), tmp_path / "whole.csv")
    titles = [section.title for section in recorded_sections(studies_of([alone, whole]))]
    assert "AP on each stream" not in titles and "Comparison: a, mini-t5" in titles, "they have no method in common"
    unfinished = runs(make_result, "a")[:1]
    unfinished[0]["metrics"] = dict.fromkeys(unfinished[0]["metrics"])
    titles = [section.title for section in recorded_sections(studies_of([recorded(unfinished, tmp_path / "u.csv")]))]
    assert titles[0] == "Comparison: a, mini-t5"
