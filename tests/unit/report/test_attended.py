"""Attention of a run: maps as training and evaluation wrote them, and how the report shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raycl.errors import RunError
from raycl.report.attended import Attended, has_attention
from raycl.report.tables import attention_table

Make = Callable[..., dict[str, Any]]

TRAIN = {"agnews": [1.0], "dbpedia": [0.25, 0.75], "yahoo": [0.125, 0.125, 0.75]}
TEST = {"agnews": [0.875, 0.125, 0.0], "dbpedia": [0.25, 0.75, 0.0], "yahoo": [0.125, 0.125, 0.75]}


def attended(result: dict[str, Any]) -> dict[str, Any]:
    told = {"keys": list(TRAIN), "train": TRAIN, "test": TEST, "pseudo": dict.fromkeys(TRAIN, 20)}
    return {**result, "stage_facts": [{}, {}, {"attention": told}]}


def test_maps_are_over_all_blocks(make_result: Make) -> None:
    found = Attended.of(attended(make_result("sapt")))
    assert found.keys == list(TRAIN)
    assert found.train["agnews"] == [1.0, 0.0, 0.0] and found.test == TEST
    assert found.moved() == {"agnews": 12.5, "dbpedia": 0.0, "yahoo": 0.0}


def test_both_maps_stand_below_each_other(make_result: Make) -> None:
    shown = attention_table(attended(make_result("sapt")))
    assert shown.index("when it was learned") < shown.index("at the end")
    assert "87.5" in shown and "12.5" in shown and "60 pseudo inputs" in shown


def test_a_run_without_attention_is_told_so(make_result: Make) -> None:
    result = make_result("lora")
    assert not has_attention(result)
    with pytest.raises(RunError, match="only runs with method=sapt do"):
        attention_table(result)
