"""Tables say what the result files say."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycl.metrics.matrix import AccuracyMatrix, averages
from raycl.metrics.run_results import Published, find_results
from raycl.operations.report.latex import escaped, to_latex
from raycl.operations.report.page.report_page import report_page
from raycl.operations.report.run_comparison import Spread, compare, runs_to_csv, seed_matrices, to_csv
from raycl.operations.report.tables import (
    comparison_table,
    matrix_table,
    routing_comparison,
    routing_table,
    side_by_side,
    tables_of,
)
from raycl.storage import Storage
from raycl.storage.records import hashed
from raycl.types import Score

Make = Callable[..., dict[str, Any]]


def cells(line: str) -> list[str]:
    return line.split()


def test_a_table_is_text_in_a_notebook_too(make_result: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """There rich would show it instead of writing it."""
    printed = str(matrix_table(make_result()))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(matrix_table(make_result())) == printed != ""


def test_matrix_table_shows_every_cell_once(make_result: Make) -> None:
    lines = str(matrix_table(make_result())).splitlines()
    assert lines[0] == "sapt on long-a, mini-t5, seed 0"
    assert cells(lines[2]) == ["agnews", "dbpedia", "yahoo"]
    assert [cells(line) for line in lines[4:7]] == [
        ["after", "agnews", "90.0"],
        ["after", "dbpedia", "80.0", "85.0"],
        ["after", "yahoo", "70.0", "80.0", "95.0"],
    ]
    assert lines[-2:] == [
        "AP 81.7  F.Ra 12.5  FWT –  BWT -12.5 (over M: -8.3)  weighted AP 81.7",
        "note: dev equals test",
    ]


def test_names_with_brackets_are_not_markup(make_result: Make) -> None:
    result = make_result()
    result["stream"]["tasks"][0] = "[red]x"
    assert "[red]x" in str(matrix_table(result))


def test_joint_and_unfinished_matrices_are_shown(make_result: Make) -> None:
    result = make_result() | {"phases": ["joint"], "metrics": {"ap": None}}
    result["matrix"] = [[None, *result["matrix"][-1][1:]]]
    assert "after joint             80.0   95.0" in str(matrix_table(result))
    assert "AP –" in str(matrix_table(result))
    unfinished = make_result() | {"finished": False}
    unfinished["matrix"][2] = [None, None, None]
    assert str(matrix_table(unfinished)).endswith("note: unfinished, 2 of 3 phases evaluated")


def test_seeds_become_mean_and_spread(make_result: Make) -> None:
    results = [make_result(seed=seed, ap=80.0 + seed) for seed in range(3)]
    (line,) = compare(results)
    assert (line.runs, line.settings, line.numbers["ap"], line.numbers["fwt"]) == (3, "", Spread(81.0, 1.0), None)
    row = str(comparison_table(compare(results))).splitlines()[-1]
    assert " ".join(cells(row)) == "sapt long-a mini-t5 3 81.0 ± 1.0 12.5 ± 0.0 – -12.5 ± 0.0 75.0 s 1,234"


def test_runs_with_other_settings_are_separate_lines(make_result: Make) -> None:
    wide = make_result("lora", seed=1)
    wide["config"]["method"]["r"] = 16
    wide["config"] |= {"tracking": {"tracker": ["wandb"]}, "eval": {"singles": "runs/single-1"}}
    lines = compare([make_result("lora"), wide, make_result("sapt")])
    assert [(line.method, line.settings) for line in lines] == [
        ("lora", "method.r=8"),
        ("lora", "method.r=16"),
        ("sapt", ""),
    ]


def test_a_setting_that_a_run_lacks_is_not_a_setting_of_it(make_result: Make) -> None:
    """`method.arm` is off in one run and has settings of its own in the other."""
    off, on = make_result(), make_result()
    off["config"]["method"]["arm"] = None
    on["config"]["method"]["arm"] = {"weight": 2}
    assert [line.settings for line in compare([off, on])] == ["method.arm=null", "method.arm.weight=2"]


def test_a_number_some_seed_lacks_has_no_mean(make_result: Make) -> None:
    lacking = make_result(seed=1)
    lacking["metrics"]["f_ra"] = None
    assert compare([make_result(), lacking])[0].numbers["f_ra"] is None


@pytest.mark.parametrize(("seconds", "text"), [(3.14, "3.1 s"), (3725.4, "1:02:05")])
def test_durations(make_result: Make, seconds: float, text: str) -> None:
    assert text in str(comparison_table(compare([make_result() | {"wall_s": seconds}])))


def test_matrices_stand_side_by_side_as_wide_as_allowed(make_result: Make) -> None:
    results = [make_result(), make_result("lora"), make_result("replay")]
    wide = side_by_side(results, width=400)
    assert cells(wide.splitlines()[2]) == ["agnews", "dbpedia", "yahoo"] * 3
    narrow = side_by_side(results, width=150)
    assert max(map(len, narrow.splitlines())) <= 150
    assert [narrow.count(f"{name} on") for name in ("sapt", "lora", "replay")] == [1, 1, 1]
    assert side_by_side(results[:1], width=10) == str(matrix_table(results[0]))


def test_csv_keeps_full_precision(make_result: Make) -> None:
    (row,) = csv.DictReader(io.StringIO(to_csv([make_result(ap=81.23456789)])))
    assert row["ap"] == "81.23456789"
    assert (row["ap_std"], row["fwt"], row["runs"]) == ("", "", "1")


def test_each_run_has_a_line_of_its_own(make_result: Make) -> None:
    first = make_result("lora", 0) | {"trained_parameters": 147456, "peak_memory_mb": 812.5, "train_s": 60.0}
    first["config"]["output"] = {"name": "lora-s0"}
    cells = dict(zip(("agnews", "dbpedia", "yahoo"), first["matrix"][-1], strict=True))
    first["untrained"] = {"cells": cells, "mean": 10.0, "unseen": None}
    again = make_result("olora", 0) | {"untrained": first["untrained"]}
    row, other, _, bare = csv.DictReader(io.StringIO(runs_to_csv([first, make_result("sapt", 1), again])))
    assert (row["run"], row["seed"], row["method"], row["f_ra"], row["fwt"]) == ("lora-s0", "0", "lora", "12.5", "")
    assert [float(row[name]) for name in ("trained_parameters", "peak_memory_mb", "train_s")] == [147456, 812.5, 60]
    assert [float(row[f"score_{task}"]) for task in ("agnews", "dbpedia", "yahoo")] == [70.0, 80.0, 95.0]
    assert (other["run"], other["seed"], other["trained_parameters"]) == ("", "1", "")
    assert (bare["run"], bare["seed"], bare["ap"], bare["f_ra"]) == ("untrained-s0", "0", "10.0", "")
    assert [float(bare[f"score_{task}"]) for task in ("agnews", "dbpedia", "yahoo")] == [70.0, 80.0, 95.0]


def test_a_papers_numbers_stand_beside_ours(make_result: Make, tmp_path: Path) -> None:
    """Tables and CSV have them, also later from the comparison's folder; a line that the paper lacks is blank there."""
    published = Published(source="SAPT, table 2", rows={"full": {"ap": 82.02, "bwt": -1.25}})
    folder = Storage.at(tmp_path)
    published.write(folder)
    for row, method in (("full", "sapt"), ("lora", "lora")):
        for seed in range(2):
            result = make_result(method, seed)
            result["config"]["output"] = {"name": f"{row}-s{seed}"}
            folder.sub(f"{row}-s{seed}").write_json("results.json", hashed(result))
    results = find_results(tmp_path)
    head, _, sapt, lora, _, source = str(comparison_table(compare(results))).splitlines()
    assert cells(head)[4:11] == ["AP", "published", "F.Ra", "FWT", "BWT", "published", "time"]
    assert " ".join(cells(sapt)[4:]).startswith("81.7 ± 0.0 82.02 12.5 ± 0.0 – -12.5 ± 0.0 -1.25 75.0 s")
    assert " ".join(cells(lora)[4:]).startswith("81.7 ± 0.0 – 12.5 ± 0.0 – -12.5 ± 0.0 – 75.0 s")
    assert source.strip() == "published: SAPT, table 2"
    row, other = csv.DictReader(io.StringIO(to_csv(results)))
    marks = {"full": {"bwt": "-1.30 is the mean of its orders"}}
    published.model_copy(update={"contradicted": marks}).write(folder)
    marked = str(comparison_table(compare(find_results(tmp_path))))
    assert " -1.25* " in marked and marked.rstrip().endswith("* sapt, BWT: -1.30 is the mean of its orders")
    assert [row["ap_published"], row["bwt_published"], row["published"]] == ["82.02", "-1.25", "SAPT, table 2"]
    assert [other["ap_published"], other["published"]] == ["", ""] and "f_ra_published" not in row
    alone = find_results(tmp_path / "full-s0")
    assert "published" not in str(comparison_table(compare(alone))) and "published" not in to_csv(alone)


def test_general_ability_has_a_difference_for_each_task(make_result: Make) -> None:
    before, after = (
        {"cells": {name: {"value": value, "extra": {}} for name, value in scores.items()}, "mean": mean}
        for scores, mean in (({"arc": 50.0, "piqa": 60.0}, 55.0), ({"arc": 30.0, "piqa": 60.0}, 45.0))
    )
    general = {"before": before, "phases": [None, None, after], "after": after, "delta": -10.0}
    result = make_result() | {"general": general}
    lines = str(matrix_table(result)).splitlines()
    assert cells(next(line for line in lines if "delta" in line)) == ["delta", "-20.0", "+0.0", "-10.0"]
    assert "delta & -20.0 & +0.0 & -10.0" in to_latex([matrix_table(result)])
    assert re.search(r"<td>delta</td>\s*<td class=\"right\">-20.0</td>", report_page([result], "page")), "of each run"


def accuracies(result: dict[str, Any]) -> dict[str, Any]:
    """Return the run with accuracies beside its scores, and their means."""
    for cell, accuracy in zip(result["matrix"][-1], (80.0, 90.0, 97.0), strict=True):
        cell["extra"]["accuracy"] = accuracy
    cells = [[cell and Score(**cell) for cell in row] for row in result["matrix"]]
    return result | {"averages": dict(averages(AccuracyMatrix(tuple(result["stream"]["tasks"]), (), cells)))}


def test_accuracy_stands_beside_f1_with_means_of_the_first_and_last_two_tasks(make_result: Make) -> None:
    result = accuracies(make_result())
    lines = [cells(line) for line in str(matrix_table(result)).splitlines()]
    assert ["score", "70.0", "80.0", "95.0", "81.7", "75.0", "87.5"] in lines
    assert ["accuracy", "80.0", "90.0", "97.0", "89.0", "85.0", "93.5"] in lines
    assert "accuracy" not in str(matrix_table(make_result()))


def test_a_comparison_has_accuracies_where_a_run_has_them(make_result: Make) -> None:
    results = [accuracies(make_result()), make_result("lora")]
    (with_them, without) = csv.DictReader(io.StringIO(to_csv(results)))
    names = ("accuracy", "accuracy_first_two", "accuracy_last_two")
    assert [float(with_them[name]) for name in names] == [89.0, 85.0, 93.5]
    assert [without[name] for name in names] == ["", "", ""]
    assert "of the first two" in str(comparison_table(compare(results))) and "accuracy" not in str(
        comparison_table(compare(results[1:]))
    )


def test_the_other_last_row_has_a_column_where_a_run_has_it(make_result: Make) -> None:
    result, blank = make_result(), {"count": 10, "extra": {}}
    values = zip(result["stream"]["tasks"], (5.0, 6.0, 7.0), strict=True)
    scored = {task: {"value": value, **blank} for task, value in values}
    result["other_row"] = {"instruction": "chosen", "cells": scored, "mean": 6.0}
    table = str(comparison_table(compare([result, make_result("slm")])))
    assert "AP, text alone" in table and "AP, with instruction" not in table
    assert "AP, text alone" not in str(comparison_table(compare([make_result()])))
    assert ["by", "the", "text", "alone", "5.0", "6.0", "7.0"] in [
        cells(line) for line in str(matrix_table(result)).splitlines()
    ]


def test_routers_stand_below_the_matrix(make_result: Make) -> None:
    result = make_result()
    assert "routed by" not in str(matrix_table(result))
    outcome = {"keys": {"a": 80.0, "b": 90.0}, "discriminant": {"a": 95.0, "b": 97.0}, "eq13": {"a": 70.0, "b": 72.0}}
    result["phase_summaries"] = [{}, {"router": "discriminant", "own_shares": outcome}]
    line = "routed by discriminant\nweight of dev texts on their own task: keys 85.0, discriminant 96.0; eq. 13 71.0"
    assert line in str(matrix_table(result))


def test_routing_by_task_marks_the_router_in_use(make_routed: Make) -> None:
    result = make_routed(["agnews", "dbpedia", "yahoo"])
    outcome = result["phase_summaries"][-1]["own_shares"]
    del outcome["keys"]["yahoo"]
    lines = str(routing_table(result)).splitlines()
    assert cells(lines[2]) == ["keys", "discriminant", "*", "eq.", "13", "novelty"]
    for line, task, novelty in zip(lines[4:7], result["phases"], ["–", "93.8", "93.8"], strict=True):
        shares = [f"{outcome[kind][task]:.1f}" if task in outcome[kind] else "–" for kind in outcome]
        assert cells(line) == [task, *shares, novelty]
    mean = (outcome["keys"]["agnews"] + outcome["keys"]["dbpedia"]) / 2
    assert cells(lines[8])[:2] == ["mean", f"{mean:.1f}"]
    assert lines[-1].startswith("*: chose the adapters; novelty:")


def test_task_incremental_routing_marks_no_router(make_routed: Make) -> None:
    lines = str(routing_table(make_routed(["agnews"], router="task"))).splitlines()
    assert cells(lines[2]) == ["keys", "discriminant", "eq.", "13"] and lines[-1] == "routed by task"


def test_runs_without_a_router_have_no_routing_table(make_result: Make) -> None:
    for summary in ({}, {"phase_summaries": []}, {"phase_summaries": [{}, {}]}):
        assert len(tables_of(make_result() | summary)) == 1, "the matrix"


def test_routers_of_several_runs_stand_in_one_table(make_routed: Make) -> None:
    seeds = [make_routed(["agnews", "dbpedia"], seed=0), make_routed(["agnews", "dbpedia"], router="keys", seed=1)]
    other = make_routed(["agnews", "yahoo"], router="keys")
    other["config"]["method"]["router"] = "keys"
    for result, share in zip([*seeds, other], (80.0, 90.0, 70.0), strict=True):
        result["phase_summaries"][-1]["own_shares"]["keys"] = dict.fromkeys(result["phases"], share)
    lines = [" ".join(cells(line)) for line in str(routing_comparison([*seeds, other])).splitlines()]
    assert lines[2] == "method stream backbone runs router used agnews dbpedia yahoo mean"
    assert lines[4] == "slm long-a mini-t5 2 keys 1 of 2 85.0 ± 7.1 85.0 ± 7.1 – 85.0 ± 7.1"
    assert lines[5].startswith("discriminant 1 of 2 ") and lines[6].startswith("eq. 13 ")
    assert lines[8] == "slm (method.router=keys) long-a mini-t5 1 keys * 70.0 – 70.0 70.0"
    assert lines[9].startswith("discriminant ") and "*" not in lines[9]


def test_seeds_have_one_matrix_of_means(make_result: Make) -> None:
    other = make_result(seed=1, ap=83.667)
    other["matrix"][0][0]["value"] = 92.0
    shown = side_by_side([make_result(), other])
    assert shown.startswith("sapt on long-a, mini-t5, seeds 0, 1\n") and shown.count("after agnews") == 1
    assert "91.0 ± 1.4" in shown and "AP 82.7 ± 1.4  F.Ra 12.5 ± 0.0  FWT –  BWT -12.5 ± 0.0" in shown


def test_runs_whose_tasks_come_in_another_order_have_matrices_of_their_own(make_result: Make) -> None:
    other = make_result(seed=1)
    other["phases"] = other["stream"]["tasks"] = ["dbpedia", "agnews", "yahoo"]
    shown = side_by_side([make_result(), other], width=10)
    assert shown.count("seed 0") == shown.count("seed 1") == 1


def test_latex_prints_names_as_they_are() -> None:
    assert escaped(r"50 % of a_b & {c} ± 1 \ …") == r"50 \% of a\_b \& \{c\} $\pm$ 1 \textbackslash{} \ldots{}"


def test_trials_of_a_sweep_are_told_apart_by_what_was_searched(make_result: Make) -> None:
    """Each publishes onto a branch of its own, which changes nothing that is learned: seeds are one line."""
    results = [make_result("slm", seed=seed) for seed in (0, 1, 0)]
    for number, (result, rate) in enumerate(zip(results, (0.01, 0.01, 0.1), strict=True)):
        result["config"] |= {"train": {"learning_rate": rate}, "bank": {"branch": f"sweeps/tune/{number:04d}"}}
    assert [(line.settings, line.runs) for line in compare(results)] == [
        ("train.learning_rate=0.01", 2),
        ("train.learning_rate=0.1", 1),
    ]
    several, single = seed_matrices(results)
    assert several.title == "slm (train.learning_rate=0.01) on long-a, mini-t5, seeds 0, 1"
    assert single.title == "slm (train.learning_rate=0.1) on long-a, mini-t5, seed 0"
    assert single.title in side_by_side(results)
