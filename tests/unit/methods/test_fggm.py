"""FGGM: Fisher information and quantile against their definitions, and what stands still while a task is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phases import begin_phase
from tiny import ENGINES, KINDS, Lab, Stop, run
from torch import Tensor

from raycl.backbone.base import loss_count
from raycl.data.loader import Collate, eval_batches
from raycl.errors import ConfigError, RunError
from raycl.methods.base import activate_batch
from raycl.methods.masks.fggm import Fggm, FggmConfig, masked_rows
from raycl.storage import Storage
from raycl.testing import check_modifier
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.data import PhaseData
from raycl.training.setup.method_checks import check_engine
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))


def begun(lab: Lab, kind: str, method: Any, index: int = 0, **settings: Any) -> tuple[Fggm, TrainingContext, PhaseData]:
    context, _ = build(lab.config(kind, method, modifiers=[{"name": "fggm", **settings}]), WORLD)
    modifier = context.modifiers.members["fggm"]
    assert isinstance(modifier, Fggm)
    data = begin_phase(context, index)
    torch.manual_seed(3)
    for name, parameter in context.backbone.named_parameters():
        if ".lora_B" in name or name.startswith("head."):  # as after a few steps
            torch.nn.init.normal_(parameter, std=0.1)
    modifier.begin_task(context.phases[index], only=False, resumed=False)
    return modifier, context, data


def fisher(context: TrainingContext, names: list[str]) -> dict[str, Tensor]:
    """Return the mean over the first task's rows of the squared gradient of each row's log-likelihood per token."""
    codec, backbone = context.backbone.codec, context.backbone
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    labels = backbone.label_ids() if codec.needs_labels else None
    own = dict(backbone.named_parameters())
    totals = {name: torch.zeros_like(own[name]) for name in names}
    backbone.train()
    backbone.model.eval()
    for batch in eval_batches(Collate([table], codec.pad_id, labels), 1):
        backbone.zero_grad()
        with activate_batch(context.method, batch):
            (backbone(batch).loss_sum / loss_count(batch)).backward()
        for name, total in totals.items():
            gradient = own[name].grad
            total += 0.0 if gradient is None else gradient.square()
    return {name: total / len(table) for name, total in totals.items()}


@pytest.mark.parametrize(("kind", "method"), [("bert", "lora"), *((kind, "finetune") for kind in KINDS)])
def test_scores_are_fisher_information_summed_over_inputs(lab: Lab, kind: str, method: str) -> None:
    modifier, context, data = begun(lab, kind, method)
    scores = modifier._scores(data)
    expected = fisher(context, list(scores))
    assert scores.keys() == set(modifier.parameter_names) and len(scores) >= 8
    for name, score in scores.items():
        whole = expected[name].sum(1, keepdim=True) if expected[name].dim() == 2 else expected[name]
        torch.testing.assert_close(score, whole, rtol=2e-3, atol=1e-9)


def test_the_smallest_share_is_masked() -> None:
    draw = np.random.default_rng(0)
    scores = {name: torch.tensor(draw.random((size, 1))) for name, size in {"a": 10, "b": 7}.items()}
    scores["zero"] = torch.zeros(5, 1)
    alone = masked_rows(scores, 0.7, together=False)
    assert {name: int(mask.sum()) for name, mask in alone.items()} == {"a": 7, "b": 4}
    for name, mask in alone.items():
        assert scores[name][mask].max() < scores[name][~mask].min()
    both = masked_rows(scores, 0.7, together=True)
    values = torch.cat([scores["a"], scores["b"]]).flatten()
    limit = np.sort(values.numpy())[int(0.7 * 17)]
    for name in ("a", "b"):
        assert torch.equal(both[name], scores[name] < limit)
    assert "zero" not in alone and "zero" not in both, "what has no Fisher information says nothing about its rows"


@pytest.mark.parametrize("scope", ["parameter", "model"])
def test_masked_rows_stand_still_while_a_task_is_learned(lab: Lab, tmp_path: Path, scope: str) -> None:
    """Other rows stand still at the next task: the mask is the task's own."""
    config = lab.config("llama", "finetune", modifiers=[{"name": "fggm", "scope": scope}], train={"weight_decay": 0.0})
    storage = Storage.at(tmp_path)
    fresh = build(config, WORLD)[0].backbone
    first = {name: parameter.detach().clone() for name, parameter in fresh.named_parameters()}

    def stop(record: dict[str, Any]) -> bool:
        raise Stop

    with pytest.raises(Stop):
        run(config, storage, on_phase=stop)
    context = run(config, storage).context
    last = dict(context.backbone.named_parameters())
    results = storage.read_json("results.json")["phase_summaries"]
    kept = [phase["modifiers"]["fggm"]["rows_kept"] for phase in results]
    shares = []
    for name in kept[0]:
        moved = (last[name] - first[name]).abs()
        rows = moved.flatten(1).any(1) if moved.dim() > 1 else moved.bool()
        shares.append(float(rows.float().mean()))
        assert shares[-1] <= kept[0][name] + kept[1][name] + 1e-6, f"{name} moves in no more rows than were trained"
    assert 0.1 < np.mean(shares) < 0.7
    if scope == "parameter":
        assert all(0.29 < share < 0.4 or share == 1.0 for phase in kept for share in phase.values())


def test_the_first_task_can_be_left_unmasked(lab: Lab, tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    run(lab.config("t5", "lora", modifiers=[{"name": "fggm", "skip_first_task": True}]), storage)
    phases = [phase["modifiers"]["fggm"] for phase in storage.read_json("results.json")["phase_summaries"]]
    assert [phase["masked"] for phase in phases] == [False, True]


def test_what_it_cannot_mask_is_said(lab: Lab) -> None:
    with pytest.raises(RunError, match=r"modifiers.fggm finds no trained weight at task 'colour'"):
        begun(lab, "bert", "prompt")
    for engine in ("zero3", "fsdp"):
        with pytest.raises(ConfigError, match=r"modifiers.fggm computes gradients of its own, which .* not support"):
            check_engine(lab.config("bert", "lora", ENGINES[engine], modifiers=["fggm"]))


def test_it_keeps_a_modifiers_contract() -> None:
    """With adapters that are published; masks are kept by the names of weights, whatever these are of."""
    check_modifier(Fggm, {"threshold": 0.5}, methods=("lora",), kinds=("bert",))


def test_its_defaults_are_the_papers() -> None:
    assert FggmConfig().threshold == 0.7 and FggmConfig().rows is None
