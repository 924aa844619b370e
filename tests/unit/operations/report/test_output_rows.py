"""Kept rows of a run: bits as training wrote them, overlaps of tasks, and how the report shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from raycl.methods.migu.row_selection import _most_often
from raycl.operations.report.phase_summaries import OutputRows, has_output_rows
from raycl.operations.report.tables import output_rows_table

Make = Callable[..., dict[str, Any]]

KEPT = {"agnews": [0, 1, 2], "dbpedia": [2, 3, 4], "yahoo": [0, 1, 9]}
"""Task -> rows, of ten, that it kept in all of its four steps."""


def with_rows(result: dict[str, Any], layers: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    summary = []
    for number, rows in enumerate(KEPT.values()):
        counts = torch.zeros(10, dtype=torch.int32)
        counts[rows] = 4
        told = dict.fromkeys(layers, _most_often(counts, 4))
        migu = {"masked": number > 0, "steps": 4, "gradient_norm_kept": 0.5 if number else None, "layers": told}
        summary.append({"modifiers": {"migu": migu}})
    return {**result, "phase_summaries": summary}


def test_bits_come_back_as_they_were(make_result: Make) -> None:
    kept = OutputRows.of(with_rows(make_result("lora")))
    assert [bits.nonzero()[0].tolist() for bits in kept.layers["a"]] == list(KEPT.values())
    assert kept.tasks == list(KEPT) and kept.masked == [False, True, True] and kept.norm_kept == [None, 50.0, 50.0]
    assert kept.chance == pytest.approx(30.0)


def test_overlap_is_the_share_of_rows_that_the_other_kept_too(make_result: Make) -> None:
    kept = OutputRows.of(with_rows(make_result("lora")))
    third = 100 / 3
    expected = [[100, third, 2 * third], [third, 100, 0], [2 * third, 0, 100]]
    for row, wanted in zip(kept.overlap(["b"]), expected, strict=True):
        assert row == pytest.approx(wanted)


def test_a_layer_without_magnitudes_of_a_task_is_left_out(make_result: Make) -> None:
    result = with_rows(make_result("lora"))
    del result["phase_summaries"][2]["modifiers"]["migu"]["layers"]["a"]
    assert list(OutputRows.of(result).layers) == ["b"]


def test_the_table_has_chance_level_and_unmasked_layers(make_result: Make) -> None:
    lines = str(output_rows_table(with_rows(make_result("lora")))).splitlines()
    assert "mean over 2 layers" in lines[0]
    assert lines[-1].startswith("30.0 is chance")
    rows = [line.split() for line in lines if line.strip().startswith(tuple(KEPT))][1:]
    assert rows[0] == ["agnews", "(not", "masked)", "100.0", "33.3", "66.7", "–"]
    assert rows[2] == ["yahoo", "66.7", "0.0", "100.0", "50.0"]


def test_runs_without_the_modifier_have_none(make_result: Make) -> None:
    plain = {**make_result("lora"), "phase_summaries": [{}, {}, {}]}
    assert not has_output_rows(plain) and not has_output_rows(make_result("lora")) and has_output_rows(with_rows(plain))
