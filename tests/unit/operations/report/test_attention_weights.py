"""Attention of a run: maps as training and evaluation wrote them, and how the report shows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from raycl.errors import RunError
from raycl.operations.report import plots
from raycl.operations.report.phase_summaries import AttentionWeights, has_attention
from raycl.operations.report.plots import attention_figure
from raycl.operations.report.tables import attention_table, tables_of

Make = Callable[..., dict[str, Any]]

TRAIN = {"agnews": [1.0], "dbpedia": [0.25, 0.75], "yahoo": [0.125, 0.125, 0.75]}
TEST = {"agnews": [0.875, 0.125, 0.0], "dbpedia": [0.25, 0.75, 0.0], "yahoo": [0.125, 0.125, 0.75]}


def attended(result: dict[str, Any]) -> dict[str, Any]:
    told = {"keys": list(TRAIN), "train": TRAIN, "test": TEST, "pseudo": dict.fromkeys(TRAIN, 20)}
    return {**result, "phase_summaries": [{}, {}, {"attention": told}]}


def test_maps_cover_all_adapters(make_result: Make) -> None:
    result = AttentionWeights.of(attended(make_result("sapt")))
    assert result.keys == list(TRAIN)
    assert result.train["agnews"] == [1.0, 0.0, 0.0] and result.test == TEST
    assert result.moved() == {"agnews": 12.5, "dbpedia": 0.0, "yahoo": 0.0}


def test_tasks_are_in_the_order_of_the_stream(make_result: Make) -> None:
    """A record has them by name."""
    result = attended(make_result("sapt"))
    result["stream"]["tasks"] = result["stream"]["tasks"][::-1]
    attention = AttentionWeights.of(json.loads(json.dumps(result, sort_keys=True)))
    known = [task for task in result["stream"]["tasks"] if task in attention.train]
    assert len(known) > 1 and list(attention.train) == known


def test_both_maps_stand_below_each_other(make_result: Make) -> None:
    shown = str(attention_table(attended(make_result("sapt"))))
    assert shown.index("when it was learned") < shown.index("at the end")
    assert "87.5" in shown and "12.5" in shown and "60 pseudo-samples" in shown


def test_fallback_samples_are_noted(make_result: Make) -> None:
    result = attended(make_result("sapt"))
    result["phase_summaries"][-1]["attention"]["fallback_samples"] = {"yahoo": 20}
    words = " ".join(str(attention_table(result)).split())
    assert "60 pseudo-samples in all, 20 of them stored training inputs" in words


def test_maps_are_drawn_side_by_side(tmp_path: Path, make_result: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = plots.save_png
    monkeypatch.setattr(plots, "save_png", lambda figure, path: save(figures.append(figure) or figure, path))
    result = attended(make_result("sapt"))
    del result["phase_summaries"][-1]["attention"]["test"]["yahoo"]
    assert plots.save_png(attention_figure([result]), tmp_path / "new" / "a.png").is_file()
    then, now, _scale = figures[0].axes
    assert [text.get_text() for text in then.texts][:4] == ["100.0", "0.0", "0.0", "25.0"]
    assert [text.get_text() for text in now.texts] == ["87.5", "12.5", "0.0", "25.0", "75.0", "0.0"]
    assert [label.get_text() for label in now.get_yticklabels()] == ["agnews", "dbpedia"], "yahoo was not evaluated"
    assert [label.get_text() for label in now.get_xticklabels()] == list(TRAIN)


def test_maps_too_large_to_read_are_refused(tmp_path: Path, make_result: Make) -> None:
    many = attended(make_result("sapt"))
    with pytest.raises(RunError, match="attention in 7 runs cannot be read"):
        plots.save_png(attention_figure([many] * 7), tmp_path / "a.png")
    many["phase_summaries"][-1]["attention"]["keys"] = [str(number) for number in range(41)]
    with pytest.raises(RunError, match="attention to 41 tasks cannot be read"):
        plots.save_png(attention_figure([many]), tmp_path / "a.png")


def test_a_run_without_attention_has_no_table_of_it(make_result: Make) -> None:
    result = make_result("lora")
    assert not has_attention(result) and len(tables_of(result)) == 1 < len(tables_of(attended(result)))
