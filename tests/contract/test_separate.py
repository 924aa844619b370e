"""Schedule `separate`: whatever a method keeps of a task, the next one starts without it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from tiny import ENGINES, KINDS, WRITERS, Lab, Stop, family, fits, run, trace
from torch import Tensor

from raycl.methods.registry import METHODS, WRAPPERS, method_class, method_config
from raycl.storage import Storage
from raycl.testing.checks import check_same

SHARED = tuple(name for name in METHODS if name not in WRAPPERS and not method_class(name).own_adapters)
"""Methods that train the same parameters on every task."""

ALL_CASES = tuple((kind, name) for kind in KINDS for name in SHARED if fits(kind, name))
CASES = sampled(ALL_CASES, keep=[])
STATEFUL = tuple(case for case in ALL_CASES if case[1] in ("das", "hat", "idbr", "l2p", "lfpt5", "moelora"))
"""Methods with more than parameters: masks, stored rows, earlier features, routers."""


SHARDING = ("fsdp", "zero3")
"""Engines that no method has which reads the backbone's weights."""


def config_of(lab: Lab, kind: str, method: str) -> Any:
    settings = {"name": "das", "general": True} if method == "das" else WRITERS.get(method, method)
    sections = {"backbone": {"dropout": 0.1}} if method == "das" else {}
    return lab.config(kind, ("separate", settings), **sections)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_every_task_starts_from_the_same(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, method: str
) -> None:
    """Parameters, label head and state when a task begins are those of the first task."""
    starts: list[tuple[Any, dict[str, Tensor]]] = []
    kept = method_class(method).begin_task

    def begin(self: Any, phase: Any, context: Any) -> None:
        values, tensors = copy.deepcopy(self.state_dict())
        own = {name: p.detach().clone() for name, p in self.backbone.named_parameters()}
        starts.append((values, {**tensors, **own}))
        assert not context.earlier_tasks
        kept(self, phase, context)

    monkeypatch.setattr(method_class(method), "begin_task", begin)
    run(config_of(lab, kind, method), Storage.at(tmp_path))
    (first_values, first), (second_values, second) = starts
    assert first_values == second_values and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("kind", "method"), sampled(STATEFUL, keep=[]))
def test_a_run_stopped_in_the_second_task_continues_the_same(lab: Lab, tmp_path: Path, kind: str, method: str) -> None:
    config, whole, stopped = config_of(lab, kind, method), Storage.at(tmp_path / "a"), Storage.at(tmp_path / "b")
    run(config, whole)
    with pytest.raises(Stop):
        run(config, stopped, after=7)
    run(config, stopped)
    check_same(stopped, whole)


@pytest.mark.parametrize(
    ("method", "engine"),
    sampled(
        [
            (name, engine)
            for name in SHARED
            if fits("bert", name)
            for engine in ENGINES
            if engine != "torch" and not (engine in SHARDING and method_config({"name": name}).reads_weights)
        ],
        needed=lambda case: (family(case[0]), case[1]),
    ),
)
def test_all_engines_start_anew(lab: Lab, tmp_path: Path, method: str, engine: str) -> None:
    """Runs on each engine have the losses of plain torch, and as many trained parameters."""
    plain = config_of(lab, "bert", method)
    other = plain.model_copy(update={"engine": lab.config("bert", "lora", ENGINES[engine]).engine})
    folders = Storage.at(tmp_path / "torch"), Storage.at(tmp_path / engine)
    for config, folder in zip((plain, other), folders, strict=True):
        run(config, folder)
    for mine, theirs in zip(*map(trace, folders), strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4, rel=1e-3)
    times = [folder.read_json("results.json")["phase_times"] for folder in folders]
    counts, result = ([entry["trained_parameters"] for entry in entries] for entries in times)
    assert counts == result and min(counts) > 0
