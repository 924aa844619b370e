"""`method.start_from=nearest`: a task's adapters begin with those of the known task whose texts are most similar."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_copies import run_and_leave
from tiny import Lab, exported, run, trace

from raycl.adapters.head import MixedHead
from raycl.config import validate
from raycl.errors import ConfigError
from raycl.methods.base import phase_labels
from raycl.methods.context import TaskContext
from raycl.methods.per_task_adapter import PerTaskAdapter, is_lower
from raycl.methods.registry import method_config
from raycl.methods.slm.slm import Slm
from raycl.operations.report.tables import matrix_table
from raycl.routing.slot_keys import cosines
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext
from raycl.types import AdapterState

NEAR = {"start_from": "nearest", "start_threshold": 0.999, "start_trial_steps": 0}
TRIED = {**NEAR, "start_trial_steps": 2}


def three(lab: Lab, kind: str, method: dict[str, Any]) -> RunConfig:
    """Return a config whose third task has the texts of the first one."""
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "again"}]
    return validate(RunConfig, lab.tree(kind, {**NEAR, **method}, stream={"tasks": tasks}))


def slots(lab: Lab) -> dict[str, Any]:
    return lab.slots(a_init_std=0.1)


LEFT = (11, 14)
"""Steps of a run with trials that are done inside the second trial, and after the phase's first checkpoint."""


@pytest.fixture(scope="module")
def tried(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[RunConfig, Path]]:
    """Name of a method -> the config of a run with trials, and a folder with `whole`, the run, and what it left at the
    steps of `LEFT`."""

    @functools.cache
    def made(name: str) -> tuple[RunConfig, Path]:
        config = three(lab, "llama", {**TRIED, **(slots(lab) if name == "slm" else {"name": "sapt"})})
        folder = tmp_path_factory.mktemp(name)
        run_and_leave(config, Storage.at(folder / "whole"), {step: folder / str(step) for step in LEFT})
        return config, folder

    return made


@pytest.mark.parametrize(("kind", "name"), [("bert", "slm"), ("bert", "soft"), ("llama", "sapt")])
def test_a_task_begins_with_the_adapter_of_the_most_similar_one(lab: Lab, tmp_path: Path, kind: str, name: str) -> None:
    """Label rows of equal name come along; the known adapter stays; results and report say so."""
    method = {
        "slm": slots(lab),
        "sapt": {"name": "sapt"},
        "soft": {"name": "sapt", "value": "prompt", "prompt_length": 2},
    }[name]
    config, storage = three(lab, kind, method), Storage.at(tmp_path / "run")
    seen: dict[str, Any] = {}
    original = PerTaskAdapter._start

    def spy(self: PerTaskAdapter, context: TaskContext, steps: int) -> None:
        original(self, context, steps)
        if context.phase.name == "again":
            labels = phase_labels(context.phase)
            known = self._learned
            for number, own in enumerate(self.stack.trainable):
                old = seen.setdefault("pairs", dict(self._pairs("again", "colour")))[own]
                for path, (low, high) in known[old].linears.items():
                    layer = self.stack.layers[path]
                    rows = layer.update.rows(number)
                    assert layer.lora_A[rows].equal(low)
                    assert torch.allclose(layer.lora_B[:, rows] * layer.update.factor, high)
                if known[old].prompt is not None:
                    assert self.backbone.prefix.trainable[number].equal(known[old].prompt)
                if isinstance(head := self.backbone.head, MixedHead):
                    start = head._trainable_rows(number).start
                    assert known[old].head_weight.abs().sum() > 0
                    assert head.weight[start : start + len(labels)].equal(known[old].head_weight)
            seen["colour"] = {k: {n: t.clone() for n, t in s.tensors().items()} for k, s in known.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PerTaskAdapter, "_start", spy)
        done = run(config, storage)
    assert seen["pairs"], "it never began"
    learner = done.context.method
    assert isinstance(learner, PerTaskAdapter)
    for adapter, tensors in seen["colour"].items():
        now = learner._learned[adapter].tensors()
        assert all(now[part].equal(tensor) for part, tensor in tensors.items())
    results = storage.read_json("results.json")
    first, second, last = results["phase_summaries"]
    assert "starts" not in second and last["starts"] == {"again": "colour"}
    assert last["nearest"]["again"] == {"task": "colour", "cosine": 1.0}
    assert second["nearest"]["animal"]["task"] == "colour" and second["nearest"]["animal"]["cosine"] < 0.999
    shown = str(matrix_table(results))
    assert "adapters began: again with those of colour (cosine 1.000)" in shown
    assert "adapters began anew: animal (nearest colour, cosine 0." in shown
    assert "starts" not in first


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_task_begins_with_known_values_that_have_the_lower_loss(
    lab: Lab, tried: Callable[[str], tuple[RunConfig, Path]], tmp_path: Path, kind: str
) -> None:
    if kind == "llama":
        storage = Storage.at(tried("sapt")[1] / "whole")
    else:
        storage = Storage.at(tmp_path)
        run(three(lab, kind, {"name": "sapt", **TRIED}), storage)
    results = storage.read_json("results.json")
    last = results["phase_summaries"][-1]
    assert last["nearest"]["again"]["near_loss"] < last["nearest"]["again"]["drawn_loss"]
    assert last["starts"] == {"again": "colour"}
    assert "began: again with those of colour (cosine 1.000; loss after the trial " in str(matrix_table(results))


@pytest.mark.parametrize("name", ["slm", "sapt"])
def test_a_task_begins_anew_where_that_has_the_lower_loss(lab: Lab, tmp_path: Path, name: str) -> None:
    """Texts are those of a known task, and answers exchanged: the run is as without `start_from`, bit for bit."""
    folder = tmp_path / "exchanged"
    shutil.copytree(lab.tasks[0]["path"], folder)
    for file in folder.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        other = {"red": "blue", "blue": "red"}
        file.write_text("\n".join(json.dumps({**row, "label": other[row["label"]]}) for row in rows) + "\n")
    tasks = [lab.tasks[0], {"name": "again", "path": str(folder)}]
    method = slots(lab) if name == "slm" else {"name": "sapt"}
    tree = {"stream": {"tasks": tasks}, "train": {"epochs": 3}}
    near, anew = (Storage.at(tmp_path / kind) for kind in ("near", "anew"))
    run(validate(RunConfig, lab.tree("bert", {**TRIED, **method}, **tree)), near)
    run(validate(RunConfig, lab.tree("bert", method, **tree)), anew)
    last = near.read_json("results.json")["phase_summaries"][-1]
    assert last["nearest"]["again"]["drawn_loss"] < last["nearest"]["again"]["near_loss"]
    assert "starts" not in last
    assert trace(near) == trace(anew) and exported(near) == exported(anew)
    shown = str(matrix_table(near.read_json("results.json")))
    assert "again (nearest colour, cosine 1.000; loss after the trial " in shown


@pytest.mark.parametrize("steps", [0, 1])
def test_a_phase_of_one_step_and_no_trial_begin_with_the_known_values(lab: Lab, tmp_path: Path, steps: int) -> None:
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "again"}]
    stream = {"tasks": tasks, "train_rows_by_task": {"again": 4}}
    method = {"name": "sapt", **NEAR, "start_threshold": 0.9, "start_trial_steps": steps}
    run(validate(RunConfig, lab.tree("llama", method, stream=stream)), Storage.at(tmp_path))
    last = Storage.at(tmp_path).read_json("results.json")["phase_summaries"][-1]
    assert last["starts"] == {"again": "colour"} and set(last["nearest"]["again"]) == {"task", "cosine"}


def test_a_trial_that_diverges_is_lost(lab: Lab, tmp_path: Path) -> None:
    """The known task's values are made infinite: the task begins anew, and its loss is no number in the results."""
    original = PerTaskAdapter._begin_as

    def broken(self: PerTaskAdapter, states: Mapping[str, AdapterState]) -> None:
        spoilt = {
            name: replace(state, linears={path: (low * torch.inf, high) for path, (low, high) in state.linears.items()})
            for name, state in states.items()
        }
        original(self, spoilt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PerTaskAdapter, "_begin_as", broken)
        run(three(lab, "llama", {"name": "sapt", **TRIED}), Storage.at(tmp_path))
    results = Storage.at(tmp_path).read_json("results.json")
    last = results["phase_summaries"][-1]
    assert last["nearest"]["again"]["near_loss"] is None and "starts" not in last
    assert "loss after the trial diverged, from drawn values " in str(matrix_table(results))


def test_losses_are_lower_by_more_than_their_standard_error() -> None:
    higher, infinite = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, torch.inf, 1.0])
    assert is_lower(higher - 0.1, higher) and not is_lower(higher, higher)
    assert not is_lower(higher - torch.tensor([0.3, -0.2, 0.0]), higher), "the mean is lower, its error as large"
    assert is_lower(higher, infinite) and not is_lower(infinite, higher) and not is_lower(infinite, infinite)


def test_plans_count_the_trials() -> None:
    config = method_config({"name": "slm", "start_from": "nearest", "start_trial_steps": 10})
    assert config.extra_passes(1, 1000) == pytest.approx(0.03)
    assert config.extra_passes(3, 39) == pytest.approx(3 * 6 / 39)
    assert config.extra_passes(1, 3) == 0 == method_config({"name": "slm"}).extra_passes(1, 1000)


def test_slots_begin_with_the_slot_of_the_nearest_key(lab: Lab, tmp_path: Path) -> None:
    config = three(lab, "llama", lab.slots(keys={"groups": 4, "steps": 40, "slots": 3}, retrieval={"top_k": 1}))
    done = run(config, Storage.at(tmp_path))
    learner = done.context.method
    assert isinstance(learner, Slm)
    router = learner.router
    keys = router.keys()
    nearest = cosines(keys["animal"], keys["colour"]).mean(1).argmax(1).tolist()
    assert router.nearest_slots("animal", "colour") == [f"colour.{slot}" for slot in nearest]


@pytest.mark.parametrize("after", LEFT)
@pytest.mark.parametrize("name", ["slm", "sapt"])
def test_a_run_continues_as_if_it_had_not_stopped(
    tried: Callable[[str], tuple[RunConfig, Path]], tmp_path: Path, name: str, after: int
) -> None:
    """It was killed in the second trial, or after the phase's first checkpoint."""
    config, folder = tried(name)
    whole, broken = Storage.at(folder / "whole"), Storage.at(shutil.copytree(folder / str(after), tmp_path / "broken"))
    run(config, broken)
    assert trace(broken)[-1] == trace(whole)[-1] and exported(broken) == exported(whole)
    last, expected = (storage.read_json("results.json")["phase_summaries"][-1] for storage in (broken, whole))
    assert "drawn_loss" in expected["nearest"]["again"] and last["nearest"] == expected["nearest"]
    assert last.get("starts") == expected.get("starts")


def test_a_task_alone_and_a_low_similarity_start_anew(lab: Lab) -> None:
    config = three(lab, "llama", {"name": "sapt", "start_threshold": 1.0})
    context, _ = build(config, DistributedContext.alone(torch.device("cpu")))
    learner = context.method
    assert isinstance(learner, PerTaskAdapter)
    learner._find_start("late", torch.ones(3), {}, 0.0)
    learner._learned = {"known": AdapterState({})}
    learner._find_start("late", torch.tensor([1.0, 0.0]), {"known": torch.tensor([0.6, 0.8])}, 0.7)
    assert learner.nearest == {"late": ("known", pytest.approx(0.6))} and not learner.starts
    learner.task_id_given = True
    learner._find_start("other", torch.ones(2), {"known": torch.ones(2)}, 0.0)
    assert "other" not in learner.nearest


def test_settings_that_contradict_it_are_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"start_from=nearest copies values between adapters, which r_by_task makes"):
        method_config({"name": "sapt", "start_from": "nearest", "r_by_task": {"colour": 2}})
    assert method_config({"name": "slm"}).independent_tasks
    assert not method_config({"name": "slm", "start_from": "nearest"}).independent_tasks
