"""Verdicts follow the result files: better and worse where the interval says so, else what could tell."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from raycl.errors import RunError
from raycl.metrics.run_results import find_results
from raycl.operations.report.latex import to_latex
from raycl.operations.report.run_comparison import grouped, to_csv
from raycl.operations.report.verdicts import methods_of, verdict_table, verdicts_of
from raycl.storage.records import hashed

Make = Callable[..., dict[str, Any]]
SEEDS = ((70.0, 80.0, 95.0), (72.0, 79.0, 93.0), (69.0, 82.0, 94.0))
"""Last scores of three seeds."""


def moved(
    make_result: Make, method: str, by: Sequence[float], seeds: Sequence[int] = (0, 1, 2)
) -> list[dict[str, Any]]:
    """Return runs of a method whose last scores are those of `SEEDS`, moved by a number for each seed."""
    results = []
    for seed, change in zip(seeds, by, strict=True):
        result = make_result(method, seed=seed)
        for cell, score in zip(result["matrix"][-1], SEEDS[seed % 3], strict=True):
            cell["value"] = score + change
        last = [cell["value"] for cell in result["matrix"][-1]]
        result["metrics"] |= {"ap": sum(last) / 3, "f_ra": (180.0 - last[0] - last[1]) / 2}
        results.append(result)
    return results


def put(folder: Path, result: dict[str, Any], scores: dict[str, list[float]]) -> None:
    """Write a run with the scores of its rows after its last phase."""
    answers = folder / "predictions/002-yahoo"
    answers.mkdir(parents=True)
    for task, values in scores.items():
        rows = [
            {"text": f"{task} {place}", "references": ["yes"], "answer": "no", "score": value}
            for place, value in enumerate(values)
        ]
        (answers / f"{task}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "results.json").write_text(json.dumps(hashed(result)))


def test_each_method_is_compared_with_the_best(make_result: Make) -> None:
    results = [
        *moved(make_result, "sapt", (0.0, 0.0, 0.0)),
        *moved(make_result, "lora", (-40.0, -41.0, -40.5)),
        *moved(make_result, "slm", (3.0, -2.0, 2.5)),
    ]
    lora, sapt = sorted(verdicts_of(results), key=lambda verdict: verdict.first)
    assert (lora.first, lora.second, lora.word) == ("lora", "slm", "worse") and lora.compared == 3
    assert lora.sentence.startswith("lora is worse than slm (AP -41.7, 95 % interval ")
    assert (sapt.word, sapt.difference.seeds) == ("cannot be told", 3) and sapt.seeds_needed > 3
    assert sapt.what_could_tell == f"{sapt.seeds_needed} seeds" in sapt.sentence
    assert sapt.difference.over == "seeds and tasks", "no scores of rows are known"
    (better, *_) = verdicts_of(results, "lora")
    assert (better.first, better.second, better.word, better.compared) == ("sapt", "lora", "better", 2)
    forgets = {verdict.first: verdict for verdict in verdicts_of(results, "slm", "f_ra")}
    assert forgets["lora"].word == "worse" and forgets["lora"].difference.mean == pytest.approx(41.67, abs=0.01)


def test_one_changed_result_changes_the_verdict(make_result: Make) -> None:
    results = [*moved(make_result, "sapt", (0.0, 0.0, 0.0)), *moved(make_result, "lora", (-8.0, -8.3, -7.8))]
    assert [verdict.word for verdict in verdicts_of(results)] == ["worse"]
    results[4] = moved(make_result, "lora", (8.0,), seeds=(1,))[0]
    assert [verdict.word for verdict in verdicts_of(results)] == ["cannot be told"]


def test_rows_of_the_runs_folders_are_paired(make_result: Make, tmp_path: Path) -> None:
    """The same rows are right in both runs but for some: paired, three seeds tell what their means alone do not."""
    for seed in range(2):
        for method, right in (("sapt", 60), ("lora", 40 + 6 * seed)):
            result = make_result(method, seed=seed)
            scores = {task: [100.0] * right + [0.0] * (80 - right) for task in ("agnews", "dbpedia", "yahoo")}
            for cell, values in zip(result["matrix"][-1], scores.values(), strict=True):
                cell["value"] = sum(values) / len(values)
            result["metrics"]["ap"] = 100 * right / 80
            put(tmp_path / f"{method}-s{seed}", result, scores)
    (verdict,) = verdicts_of(find_results(tmp_path))
    assert verdict.difference is not None and verdict.difference.over == "seeds and test rows"
    assert len(verdict.difference.parts) == 4, "seeds, and the rows of three tasks"
    (tmp_path / "lora-s1/predictions/002-yahoo/yahoo.jsonl").unlink()
    (verdict,) = verdicts_of(find_results(tmp_path))
    assert verdict.difference is not None and verdict.difference.over == "seeds and tasks"


def test_a_run_that_is_given_twice_is_no_second_seed(make_result: Make) -> None:
    results = [*moved(make_result, "sapt", (0.0,), (0,)), *moved(make_result, "lora", (-16.0,), (0,))]
    (once,), (twice,) = verdicts_of(results), verdicts_of(results * 2)
    assert twice.tree == once.tree and once.tree["seeds"] == 1


def test_a_fused_row_is_no_reference_of_its_own_accord(make_result: Make) -> None:
    fused = moved(make_result, "slm", (9.0, 9.0, 9.0))
    for result in fused:
        result["fused"] = {"how": "ties", "density": 0.2}
    methods = methods_of([*fused, *moved(make_result, "lora", (0.0, 1.0, 2.0))], "ap")
    assert {method.title: method.competes for method in methods} == {"lora": True, "slm, fused by ties": False}
    other = moved(make_result, "slm", (5.0, 5.0, 5.0))
    for result in other:
        result["fused"] = {"how": "ties", "density": 0.9}
    assert [settings for settings, _ in grouped([*fused, *other])] == ["fused.density=0.2", "fused.density=0.9"]


def test_what_cannot_be_compared(make_result: Make) -> None:
    results = [*moved(make_result, "sapt", (0.0,), seeds=(0,)), *moved(make_result, "lora", (-9.0,), seeds=(1,))]
    (verdict,) = verdicts_of(results)
    assert verdict.difference is None and verdict.what_could_tell == "runs with a seed in common"
    assert "they have no seed in common" in verdict.sentence
    elsewhere = make_result("slm")
    elsewhere["stream"]["name"] = "long-b"
    assert verdicts_of([results[0], elsewhere]) == [] == verdicts_of(results[:1])
    with pytest.raises(RunError, match="no method of these runs is named 'slm': expected one of sapt, lora"):
        verdicts_of(results, "slm")


def test_a_joint_run_is_no_reference_of_its_own_accord(make_result: Make) -> None:
    joint = moved(make_result, "joint", (20.0, 20.0, 20.0))
    for result in joint:
        result["config"]["stream"]["schedule"] = "joint"
    results = [*joint, *moved(make_result, "sapt", (0.0, 0.0, 0.0)), *moved(make_result, "lora", (-9.0, -9.0, -9.0))]
    assert {verdict.second for verdict in verdicts_of(results)} == {"sapt"}
    for result in joint:
        result["metrics"]["f_ra"] = None
    assert verdicts_of(results, "joint, joint", "f_ra") == [], "it has no forgetting"


def test_tables_csv_and_latex_have_them(make_result: Make) -> None:
    results = [*moved(make_result, "sapt", (0.0, 0.0, 0.0)), *moved(make_result, "lora", (-40.0, -41.0, -40.5))]
    verdicts = verdicts_of(results)
    shown = str(verdict_table(verdicts))
    assert " ".join(shown.splitlines()[4].split()).startswith("lora sapt -40.5 ")
    assert "p by Holm over 1 comparison, told below 0.05" in shown
    lines = list(csv.DictReader(io.StringIO(to_csv(results, [verdict.tree for verdict in verdicts]))))
    assert [(line["ap_against"], line["ap_verdict"]) for line in lines] == [("", ""), ("sapt", "worse")]
    assert float(lines[1]["ap_low"]) < float(lines[1]["ap_difference"]) < float(lines[1]["ap_high"]) < 0
    assert "lora & sapt & -40.5 & " in to_latex([verdict_table(verdicts)])
