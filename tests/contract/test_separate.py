"""Schedule `separate`: whatever a method keeps of a task, the next one starts without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from crash_copies import copied_after, left_after
from tiny import ENGINES, KINDS, WRITERS, Lab, family, fits, run, trace
from torch import Tensor

from raycl.methods.registry import METHODS, WRAPPERS, method_class, method_config
from raycl.storage import Storage
from raycl.testing.checks import check_same

SHARED = tuple(name for name in METHODS if name not in WRAPPERS and not method_class(name).own_adapters)
"""Methods that train the same parameters on every task."""

SHARDING = ("fsdp", "zero3")
"""Engines that no method has which reads the backbone's weights."""

ENGINE_CASES = sampled(
    [
        (name, engine)
        for name in SHARED
        if fits("bert", name)
        for engine in ENGINES
        if engine != "torch" and not (engine in SHARDING and method_config({"name": name}).reads_weights)
    ],
    needed=lambda case: (family(case[0]), case[1]),
)
ALL_CASES = tuple((kind, name) for kind in KINDS for name in SHARED if fits(kind, name))
STATEFUL = tuple(case for case in ALL_CASES if case[1] in ("das", "hat", "idbr", "l2p", "lfpt5", "moelora"))
"""Methods with more than parameters: masks, stored rows, earlier features, routers."""
STOPPED = sampled(STATEFUL, keep=[case for case in STATEFUL if case in [("bert", name) for name, _ in ENGINE_CASES]])
CASES = sampled(ALL_CASES, keep=[*STOPPED, *(("bert", name) for name, _ in ENGINE_CASES)])
"""In a sample, the runs that the others are compared with, and every other method."""


LEFT_AT = 7
"""Steps after which a crash is looked at: behind the second task's checkpoint."""


def config_of(lab: Lab, kind: str, method: str) -> Any:
    settings = {"name": "das", "general": True} if method == "das" else WRITERS.get(method, method)
    sections = {"backbone": {"dropout": 0.1}} if method == "das" else {}
    return lab.config(kind, ("separate", settings), **sections)


@dataclass(frozen=True)
class Separate:
    """A complete run on plain torch.

    Attributes:
        starts: values and tensors of the method and its backbone when each task began.
        earlier: tasks that the method was told of as earlier ones, when each began.
    """

    config: Any
    storage: Storage
    starts: list[tuple[Any, dict[str, Tensor]]]
    earlier: list[Any]


@pytest.fixture(scope="module")
def separate(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Separate]:
    """(backbone kind, method) -> its run, made when first asked for; a crash after `LEFT_AT` steps is kept."""
    done: dict[tuple[str, str], Separate] = {}

    def get(kind: str, method: str) -> Separate:
        if (kind, method) in done:
            return done[kind, method]
        storage = Storage.at(tmp_path_factory.mktemp(f"{kind}-{method}"))
        result = Separate(config_of(lab, kind, method), storage, [], [])
        kept = method_class(method).begin_task

        def begin(self: Any, phase: Any, context: Any) -> None:
            values, tensors = copy.deepcopy(self.state_dict())
            own = {name: p.detach().clone() for name, p in self.backbone.named_parameters()}
            result.starts.append((values, {**tensors, **own}))
            result.earlier.append(context.earlier_tasks)
            kept(self, phase, context)

        with pytest.MonkeyPatch.context() as patch, copied_after(storage, LEFT_AT):
            patch.setattr(method_class(method), "begin_task", begin)
            run(result.config, storage)
        done[kind, method] = result
        return result

    return get


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_every_task_starts_from_the_same(separate: Callable[[str, str], Separate], kind: str, method: str) -> None:
    """Parameters, label head and state when a task begins are those of the first task."""
    result = separate(kind, method)
    (first_values, first), (second_values, second) = result.starts
    assert first_values == second_values and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(result.earlier)


@pytest.mark.parametrize(("kind", "method"), STOPPED)
def test_a_run_stopped_in_the_second_task_continues_the_same(
    separate: Callable[[str, str], Separate], tmp_path: Path, kind: str, method: str
) -> None:
    whole = separate(kind, method)
    stopped = left_after(whole.storage, LEFT_AT, tmp_path)
    run(whole.config, stopped)
    check_same(stopped, whole.storage)


@pytest.mark.parametrize(("method", "engine"), ENGINE_CASES)
def test_all_engines_start_anew(
    lab: Lab, separate: Callable[[str, str], Separate], tmp_path: Path, method: str, engine: str
) -> None:
    """Runs on each engine have the losses of plain torch, and as many trained parameters."""
    plain = separate("bert", method)
    other = plain.config.model_copy(update={"engine": lab.config("bert", "lora", ENGINES[engine]).engine})
    folders = plain.storage, Storage.at(tmp_path)
    run(other, folders[1])
    for mine, theirs in zip(*map(trace, folders), strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4, rel=1e-3)
    times = [folder.read_json("results.json")["phase_times"] for folder in folders]
    counts, result = ([entry["trained_parameters"] for entry in entries] for entries in times)
    assert counts == result and min(counts) > 0
