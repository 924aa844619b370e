"""The page about runs: what it leaves out, and texts that are no markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from raycl.errors import RunError
from raycl.metrics.run_results import find_results
from raycl.operations.report.page.page_figures import scores_figure, verdicts_figure
from raycl.operations.report.page.report_page import page_of, report_page
from raycl.operations.report.page.sections import MOST_CURVES, cost_section, sections_of
from raycl.operations.report.plots import DARK, matrix_figure, svg_of
from raycl.operations.report.run_comparison import compare
from raycl.operations.report.verdicts import Verdict
from raycl.storage.records import hashed

Make = Callable[..., dict[str, Any]]


def titles(results: list[dict[str, Any]]) -> list[str]:
    return [section.title for section in sections_of(results)]


def test_sections_are_those_that_runs_have_numbers_for(make_result: Make, make_routed: Make) -> None:
    alone = titles([make_result()])
    assert alone[:2] == ["Comparison", "Accuracy matrices"] and "Routing" not in alone and "Verdicts" not in alone
    routed = make_routed(["agnews", "dbpedia"])
    found = titles([routed])
    assert {"Routing", "Router confusion", "Out-of-distribution scores"} <= {*found}
    assert not {"Attention over adapters", "Map of texts"} & {*found}
    texts = [{"x": 1.0, "y": 2.5, "task": task} for task in routed["stream"]["tasks"]]
    routed["phase_summaries"][-1]["text_plane"] = texts
    (drawn,) = [section for section in sections_of([routed]) if section.title == "Map of texts"]
    assert drawn.figure is not None and "2.500" in str(drawn.numbers[0])
    found = titles([make_routed(["agnews", "dbpedia"], router="task")])
    assert "Routing" in found and "Router confusion" not in found, "the task was given"
    for summary in routed["phase_summaries"]:
        del summary["own_shares"], summary["ood"]  # its confusion counts texts
    found = titles([routed])
    assert "Router confusion" not in found, "a run of an earlier version"
    assert "Out-of-distribution scores" in found, "which has the mean before each task was learned"
    for summary in routed["phase_summaries"]:
        summary["novelty"] = {}
    assert "Out-of-distribution scores" not in titles([routed]), "a run without dev texts"
    assert "Verdicts" in titles([make_result("lora"), make_result("sapt")])
    unfinished = make_result() | {"finished": False, "metrics": {"ap": None, "f_ra": None}}
    unfinished["matrix"][1:] = [[None] * 3] * 2
    assert "Forgetting and transfer" not in titles([unfinished])


def test_texts_of_runs_are_no_markup(make_result: Make, tmp_path: Path) -> None:
    result = make_result()
    result["config"]["method"]["note"] = "<b>bold</b>"
    for phase in ("000-agnews", "002-yahoo"):
        folder = tmp_path / "run/predictions" / phase
        folder.mkdir(parents=True)
        row = {"text": "<img src=x onerror=alert(1)>", "references": ["$x$"], "answer": phase, "score": 0.0}
        (folder / "agnews.jsonl").write_text(f"{json.dumps(row)}\n")
    (tmp_path / "run/results.json").write_text(json.dumps(hashed(result)))
    page = report_page(find_results(tmp_path), "<i>title</i>")
    assert "<img" not in page and "<b>" not in page and "<i>" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page and "&lt;b&gt;bold" in page
    assert "<td>000-agnews</td><td>002-yahoo</td>" in page, "when its task was new, and after the last one"


def test_a_picture_follows_the_colours_of_the_page(make_result: Make) -> None:
    picture = svg_of(matrix_figure([make_result()]))
    assert picture.startswith("<svg") and "currentColor" in picture and "#000000" not in picture
    assert DARK in picture and "<metadata" not in picture and "sapt on long-a" in picture
    assert picture == svg_of(matrix_figure([make_result()])), "the same file for the same runs"


def test_many_settings_are_all_in_tables(make_result: Make) -> None:
    results = [make_result(f"method{number}") for number in range(MOST_CURVES + 3)]
    sections = sections_of(results)
    curves = next(section for section in sections if section.title == "Accuracy over time")
    assert curves.lead == [f"The {MOST_CURVES} settings with the highest AP."]
    page = page_of(sections, "many")
    assert all(f"<td>method{number}</td>" in page for number in range(MOST_CURVES + 3))
    with pytest.raises(RunError, match="no method of these runs is named 'nothing'"):
        report_page(results, "many", "nothing")


def test_costs_that_runs_have_are_columns(make_result: Make) -> None:
    heads = [*("method", "runs", "time, s"), "before steps, s", "kept for each task, MiB"]
    costs = {"wall_s": 61.0, "prepare_s": 12.3, "kept_mb_per_task": 0.4567}
    bare = dict.fromkeys(("tokens_per_s", "train_s", "trained_parameters", "peak_memory_mb"))
    section = cost_section(compare([make_result("slm") | bare | costs, make_result("lora") | bare]))
    (page,) = section.tables
    lines = str(page).splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == heads
    assert any(line.split() == ["slm", "1", "61", "12", "0.46"] for line in lines)


def test_panels_are_those_of_tasks_and_epochs_are_whole(make_result: Make) -> None:
    result = make_result()
    two = result | {"phases": ["agnews", "dbpedia"], "stream": result["stream"] | {"tasks": ["agnews", "dbpedia"]}}
    two |= {"matrix": [row[:2] for row in result["matrix"][:2]], "epochs": {"agnews": {"1": 40.0, "2": 60.0}}}
    sections = {section.title: section for section in sections_of([two])}
    curves, epochs = sections["Accuracy over time"].figure, sections["Epochs of a task"].figure
    assert curves is not None and epochs is not None
    assert [axes.get_title(loc="left") for axes in curves.axes if axes.get_visible()] == ["agnews", "dbpedia"]
    assert all(float(tick).is_integer() for tick in epochs.axes[0].get_xticks())


def test_a_running_run_has_answers_after_its_last_evaluated_task(make_result: Make, tmp_path: Path) -> None:
    result = make_result()
    result["matrix"][2] = [None, None, None]
    for phase in ("000-agnews", "001-dbpedia"):
        folder = tmp_path / "run/predictions" / phase
        folder.mkdir(parents=True)
        row = {"text": "a text", "references": ["x"], "answer": phase, "score": 0.0}
        (folder / "agnews.jsonl").write_text(f"{json.dumps(row)}\n")
    (tmp_path / "run/results.json").write_text(json.dumps(hashed(result)))
    assert "<td>000-agnews</td><td>001-dbpedia</td>" in report_page(find_results(tmp_path), "running")


def test_names_of_verdicts_are_those_of_methods_where_they_have_one_reference() -> None:
    """Pairs of names with settings are too long to be told apart."""

    def names(*pairs: tuple[str, str]) -> list[str]:
        axes = verdicts_figure([Verdict(first, second, "ap", None) for first, second in pairs]).axes[0]
        return [label.get_text() for label in axes.get_yticklabels()]

    best, lora, other = (f"{name} (train.learning_rate=0.01)" for name in ("slm", "lora", "gem"))
    assert names((lora, best), (other, best)) == [lora, other]
    assert names(("lora", "slm"), ("gem", "lora")) == ["lora – slm", "gem – lora"]


def test_a_mark_at_a_hundred_is_whole(make_result: Make) -> None:
    axes = scores_figure(compare([make_result(ap=100.0)])).axes[0]
    assert axes.get_xlim()[1] > 101


def test_runs_on_two_streams_have_sections_of_their_own(make_result: Make) -> None:
    """In one picture the same method stood twice, and streams that nothing compares beside each other."""
    here = [make_result("sapt"), make_result("lora", ap=40.0)]
    there = [make_result("sapt", ap=20.0), make_result("lora", ap=10.0)]
    for result in there:
        result["stream"]["name"] = result["config"]["stream"]["name"] = "long-b"
    sections = sections_of([*here, *there])
    *of_one, last = titles(here)
    assert [section.title for section in sections] == [
        *(f"{title}: {bench}, mini-t5" for bench in ("long-a", "long-b") for title in of_one),
        last,
    ]
    comparisons = [section for section in sections if section.title.startswith("Comparison")]
    for section, high in zip(comparisons, ("81.7", "20.0"), strict=True):
        table = next(part for part in section.tables[0].renderables if isinstance(part, Table))
        assert len(table.rows) == 2 and high in [str(cell) for column in table.columns for cell in column.cells]


def test_texts_outside_the_stream_that_count_as_unknown_are_drawn(make_result: Make) -> None:
    shares = {"arc": 0.9, "piqa": 0.25}
    cells = {name: {"value": 50.0, "extra": {"unknown": share}} for name, share in shares.items()}
    after = {"cells": cells, "mean": 50.0}
    general = {"before": after, "phases": [None, None, after], "after": after, "delta": 0.0}
    result = make_result() | {"general": general}
    result["config"]["eval"] = {"false_alarms": 0.05}
    assert "Texts outside the stream" not in titles([make_result()])
    (section,) = [section for section in sections_of([make_result("lora"), result]) if "outside" in section.title]
    assert section.figure is not None and len(section.numbers) == 1, "the run that measured them"
    assert 96 * (section.figure.get_tightbbox().width + 0.2) <= 320, "the pixels of a picture on a phone"
    axes = section.figure.axes[0]
    mark, line = axes.lines
    assert [label.get_text() for label in axes.get_yticklabels()] == list(shares)
    assert [*mark.get_xdata()] == [90.0, 25.0] and [*mark.get_ydata()] == [0, 1]
    assert [*line.get_xdata()] == [5.0, 5.0] and line.get_label() == "eval.false_alarms=0.05"
    assert ["arc", "90.0"] in [row.split() for row in str(section.numbers[0]).splitlines()]
