"""Overlaps of large outputs: shares counted by hand, kinds of layers, seeds as one column, and the picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raycl.errors import RunError
from raycl.methods.migu.row_selection import packed_rows
from raycl.operations.report.output_row_probe import ALL, probe_csv, probe_table, probes_of
from raycl.operations.report.plots import probe_maps

Make = Callable[..., dict[str, Any]]

WI, Q = ["encoder.block.0.layer.1.wi", "encoder.block.1.layer.1.wi"], "encoder.block.0.layer.0.q"
SAME, APART = [[0, 1], [0, 1], [0, 1]], [[0, 1], [1, 2], [2, 3]]
"""Rows of each of three tasks, of ten: all the same; neighbours share one of two."""


def measured(trained: dict[str, list[list[int]]]) -> dict[str, Any]:
    def packed(rows: list[int]) -> dict[str, Any]:
        bits = torch.zeros(10, dtype=torch.bool)
        bits[rows] = True
        return packed_rows(bits)

    untrained = dict.fromkeys(trained, SAME)
    models = {
        name: {path: list(map(packed, kept)) for path, kept in layers.items()}
        for name, layers in (("trained", trained), ("untrained", untrained))
    }
    return {"tasks": ["agnews", "dbpedia", "yahoo"], "settings": {"rows": 5, "threshold": 0.8}, "models": models}


def with_migu(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "config": {**result["config"], "modifiers": {"migu": {"threshold": 0.8}}}}


def test_shares_are_counted_by_pairs_and_averaged_over_layers_of_a_kind_and_seeds(make_result: Make) -> None:
    results = [make_result("finetune"), with_migu(make_result("finetune")), with_migu(make_result("finetune", seed=1))]
    result = [measured({WI[0]: SAME, WI[1]: APART, Q: SAME})]  # kinds: wi 100 and 33.3, q 100
    result += [measured(dict.fromkeys([*WI, Q], APART)), measured({WI[0]: SAME, WI[1]: SAME, Q: APART})]
    (probes,) = probes_of(results, result)
    assert probes.chance == pytest.approx(20)
    assert {kind: len(paths) for kind, paths in probes.kinds.items()} == {
        "encoder.block.*.layer.*.wi": 2,
        "encoder.block.*.layer.*.q": 1,
        ALL: 3,
    }
    _, plain, migu = probes.models
    third = 100 / 3  # of three pairs, two share one of two rows and one shares none
    assert [model.title for model in probes.models] == ["untrained", "finetune", "finetune+migu"]
    assert plain.mean_overlap(WI).mean == pytest.approx((100 + third) / 2)  # type: ignore[union-attr]
    assert plain.overlap([WI[1]]) == [[100, 50, 0], [50, 100, 50], [0, 50, 100]]
    spread = migu.mean_overlap(WI)
    assert spread is not None and spread.mean == pytest.approx((third + 100) / 2)
    assert spread.std == pytest.approx((100 - third) / 2**0.5)
    lines = probe_table(probes).splitlines()
    assert lines[-1] == "20.0 is chance" and "at most 5 texts each" in lines[0]
    (cells,) = [line.split()[1:] for line in lines if ".wi" in line]
    assert cells == ["(2)", "100.0", "66.7", "66.7", "±", "47.1"]
    rows = list(csv.DictReader(io.StringIO(probe_csv([probes]))))
    q = [row for row in rows if row["layers"].endswith(".q") and row["model"] == "finetune+migu"]
    assert len(rows) == 9 and float(q[0]["overlap"]) == pytest.approx(third) and q[0]["runs"] == "2"


def test_layers_are_chosen_by_the_end_of_their_path(make_result: Make) -> None:
    result = [measured({WI[0]: SAME, WI[1]: APART, Q: SAME})]
    (probes,) = probes_of([make_result("lora")], result, "block.1.*wi")
    assert probes.kinds[ALL] == [WI[1]]
    with pytest.raises(RunError, match="no measured layer ends with 'w'"):
        probes_of([make_result("lora")], result, "w")


def test_runs_that_were_measured_otherwise_stand_apart(make_result: Make) -> None:
    item, other = measured({Q: SAME}), measured({Q: APART})
    other["settings"]["rows"] = 9
    assert [probes.rows for probes in probes_of([make_result("lora"), make_result("sapt")], [item, other])] == [5, 9]


def test_settings_in_which_columns_differ_are_named_by_the_last_part_of_their_keys(make_result: Make) -> None:
    mine, other = with_migu(make_result("finetune")), with_migu(make_result("finetune"))
    other["config"]["modifiers"] = {"migu": {"threshold": 0.9}}
    (probes,) = probes_of([mine, other], [measured({Q: SAME}), measured({Q: APART})])
    titles = [model.title for model in probes.models[1:]]
    assert titles == ["finetune+migu (threshold=0.8)", "finetune+migu (threshold=0.9)"]


def test_the_picture_has_a_map_for_each_model(make_result: Make, tmp_path: Path) -> None:
    results = [make_result("finetune"), with_migu(make_result("finetune"))]
    probes = probes_of(results, [measured({Q: SAME}), measured({Q: APART})])
    assert probe_maps(probes, tmp_path / "new" / "overlap.png").is_file()
    many = [make_result("finetune") | {"config": {**results[0]["config"], "r": n}} for n in range(40)]
    with pytest.raises(RunError, match="picture of 41 models"):
        probe_maps(probes_of(many, [measured({Q: SAME})] * 40), tmp_path / "no.png")
