"""`jobs/report.py` as a user runs it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycl.storage.records import hashed

JOB = Path(__file__).parents[4] / "jobs" / "report.py"


@pytest.fixture
def report() -> Callable[[list[str]], int]:
    spec = importlib.util.spec_from_file_location("report_job", JOB)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[[list[str]], int] = module.main
    return main


def test_prints_matrices_and_comparison_and_writes_files(
    tmp_path: Path,
    make_result: Callable[..., dict[str, Any]],
    report: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    attention = {"keys": ["agnews"], "train": {"agnews": [1.0]}, "test": {"agnews": [1.0]}, "pseudo": {"agnews": 2}}
    for name, summary in (("sapt", [{"attention": attention}]), ("lora", [])):
        (tmp_path / "runs" / name).mkdir(parents=True)
        result = make_result(name) | {"phase_summaries": summary}
        (tmp_path / "runs" / name / "results.json").write_text(json.dumps(hashed(result)))
    png, csv, maps = (tmp_path / "out" / name for name in ("m.png", "c.csv", "a.png"))
    wanted = ["--png", str(png), "--csv", str(csv), "--attention-png", str(maps)]
    wanted += ["--latex", str(tmp_path / "out" / "tables.tex"), "--matrix-csv", str(tmp_path / "out" / "cells.csv")]
    assert report([str(tmp_path / "runs"), *wanted]) == 0 and maps.is_file()
    text = capsys.readouterr().out
    assert text.count("after yahoo") == 2 and "tokens/s" in text
    assert png.is_file() and csv.read_text().startswith("method,settings,stream,backbone,runs,ap,ap_std")
    cells = (tmp_path / "out" / "cells.csv").read_text().splitlines()
    assert cells[0] == "method,settings,stream,backbone,runs,after,task,mean,std"
    assert cells[1] == "lora,,long-a,mini-t5,1,agnews,agnews,90.0," and len(cells) == 13
    latex = (tmp_path / "out" / "tables.tex").read_text()
    assert latex.count(r"\toprule") == latex.count(r"\bottomrule") == 6, "attention twice, verdicts too"
    assert "after dbpedia & 80.0 & 85.0 & " in latex and r"\caption{lora on long-a, mini-t5, seed 0. AP 81.7" in latex


def test_routing_is_printed_and_drawn_for_runs_that_have_it(
    tmp_path: Path,
    make_result: Callable[..., dict[str, Any]],
    make_routed: Callable[..., dict[str, Any]],
    report: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = {"lora": make_result("lora"), "slm": make_routed(["agnews"]), "slm-1": make_routed(["agnews"], seed=1)}
    for name, result in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(hashed(result)))
    png = tmp_path / "out" / "router.png"
    assert report([str(tmp_path / "lora"), str(tmp_path / "slm"), "--router-png", str(png)]) == 0
    text = capsys.readouterr().out
    assert png.is_file() and text.count("discriminant *") == 1 and "routers:" not in text
    assert report([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "slm on long-a, mini-t5, seeds 0, 1" in text and "discriminant *" not in text
    assert report([str(tmp_path), "--each"]) == 0
    text = capsys.readouterr().out
    assert text.count("discriminant *") == 2 and text.count("routers:") == 1
    assert report([str(tmp_path / "lora"), "--router-png", str(png)]) == 1
    assert capsys.readouterr().err.startswith("error: none of these runs has a router to draw")
    for option, file in (("--html", tmp_path), ("--png", png / "a.png")):
        assert report([str(tmp_path), option, str(file)]) == 1
        assert capsys.readouterr().err.startswith(f"error: cannot write '{file}': ")


def test_errors_are_one_line_and_status_one(
    tmp_path: Path, report: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: no results.json") and captured.err.count("\n") == 1
