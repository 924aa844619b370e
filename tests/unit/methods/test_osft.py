"""OSFT: which directions stand still, what each layer keeps, and PEFT's numbers for the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.osf.utils import decompose_weight_matrix, project_gradient_to_orthogonal_space
from phases import begin_phase, end_phase
from pydantic import ValidationError
from tiny import KINDS, Lab, Stop, run

from raycl.data.loader import Collate, eval_batches
from raycl.methods.base import activate_batch
from raycl.methods.osft import Osft, OsftConfig, TopDirections, block_of, observed_blocks, shares
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.records.checkpoint import read_checkpoint
from raycl.training.records.journal import read_state
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))


def started(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[Osft, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "osft", **settings}), WORLD)
    assert isinstance(context.method, Osft)
    return context.method, context


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6)])
def test_projections_are_pefts(shape: tuple[int, int]) -> None:
    """PEFT projects the gradients of both factors; an update of W is projected as both are."""
    draw = torch.Generator().manual_seed(0)
    weight, before, after = (torch.randn(*shape, generator=draw) for _ in range(3))
    top = TopDirections()
    top.decompose("w", weight, 0.5)
    theirs = decompose_weight_matrix(weight, top_k=min(shape) // 2)
    high = shape[0] >= shape[1]
    torch.testing.assert_close(top.kept["w"], theirs["U_high"] if high else theirs["V_high"].T)
    torch.testing.assert_close(top.free["w"], theirs["V_low"].data.T if high else theirs["U_low"].data)
    factors = {**theirs}
    for name, gradient in {"U_low": after - before, "S_low": None, "V_low": after - before}.items():
        factors[name] = torch.nn.Parameter(torch.zeros(shape))
        factors[name].grad = None if gradient is None else gradient.clone()
    project_gradient_to_orthogonal_space(factors)
    by_left = factors["U_low"].grad
    factors["V_low"].grad, factors["U_low"].grad = by_left.clone(), None
    project_gradient_to_orthogonal_space(factors)
    torch.testing.assert_close(top("w", before, after), before + factors["V_low"].grad, atol=1e-5, rtol=1e-5)


def test_what_pefts_factors_reach_is_reached() -> None:
    """Any U, S and V of the smaller directions, with U off U_k and V off V_k, are an update that is left whole."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(8, 6, generator=draw)
    theirs = decompose_weight_matrix(weight, top_k=3)
    top = TopDirections()
    top.decompose("w", weight, 0.5)
    u = torch.randn(8, 3, generator=draw)
    v = torch.randn(3, 6, generator=draw)
    u = u - theirs["U_high"] @ (theirs["U_high"].T @ u)
    v = v - (v @ theirs["V_high"].T) @ theirs["V_high"]
    new = (theirs["U_high"] * theirs["S_high"]) @ theirs["V_high"] + (u * torch.rand(3, generator=draw)) @ v
    torch.testing.assert_close(top("w", weight, new), new, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_directions_stand_still_and_others_move(lab: Lab, tmp_path: Path, kind: str) -> None:
    """Over a whole task with Adam, whose steps are no multiples of gradients."""
    config = lab.config(kind, {"name": "osft", "least": 0.5, "most": 0.5}, train={"weight_decay": 0.1})
    fresh = build(config, WORLD)[0].backbone
    first = {name: parameter.detach().clone() for name, parameter in fresh.named_parameters()}
    storage = Storage.at(tmp_path)

    def stop(record: dict[str, Any]) -> bool:
        raise Stop

    with pytest.raises(Stop):
        run(config, storage, on_phase=stop)
    learned = read_checkpoint(storage, read_state(storage).checkpoints[-1]).parameters
    weights = [name for name in learned if not name.startswith("head.")]
    moved = 0
    for name in weights:
        u, s, v = np.linalg.svd(first[name].double().numpy(), full_matrices=False)
        half, value = len(s) // 2, learned[name].double().numpy()
        np.testing.assert_allclose(u[:, :half].T @ value, s[:half, None] * v[:half], atol=1e-5)
        np.testing.assert_allclose(value @ v[:half].T, u[:, :half] * s[:half], atol=1e-5)
        moved += int(np.abs(value - first[name].numpy()).max() > 1e-4)
    assert moved > len(weights) // 2 and len(weights) >= 12
    run(config, storage)
    assert storage.read_json("results.json")["finished"]


def test_weights_outside_of_all_blocks_keep_the_most(lab: Lab, tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    run(lab.config("llama", {"name": "osft", "target_modules": ["lm_head"]}), storage)
    assert storage.read_json("results.json")["finished"]


def test_layers_that_change_their_inputs_less_keep_more() -> None:
    result = shares({"a": 0.9, "b": 0.6, "c": 0.3}, 0.1, 0.8)
    assert result == pytest.approx({"a": 1.0, "b": 0.8, "c": 0.1 + 0.5 * 0.7})
    assert shares({"a": 0.2, "b": 0.2}, 0.1, 0.8) == pytest.approx({"a": 0.8, "b": 0.8})
    assert shares({"a": 0.0, "b": 0.0}, 0.1, 0.8) == {"a": 0.1, "b": 0.1}
    with pytest.raises(ValidationError, match=r"least is 0.9 and most 0.8: expected least up to most"):
        OsftConfig(least=0.9)


@pytest.mark.parametrize("kind", KINDS)
def test_importance_is_the_cosine_over_real_tokens(lab: Lab, kind: str) -> None:
    """A batch with padding gives the sum over its examples one by one; each weight's rank follows from its block."""
    method, context = started(lab, kind)
    data = begin_phase(context)
    names = dict.fromkeys(map(block_of, method._weights))
    blocks = {block: context.backbone.model.get_submodule(block.removeprefix("model.")) for block in names}
    assert len(blocks) == (4 if kind == "t5" else 2)
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    with observed_blocks(context.backbone, blocks) as seen, torch.no_grad():
        for batch in eval_batches(Collate([table], codec.pad_id, labels), 1):
            seen.begin_batch(batch)
            with activate_batch(method, batch):
                context.backbone(batch)
    cosines = {block: float(total[0] / total[1]) for block, total in seen.totals.items()}
    expected = shares(cosines, 0.1, 0.8)
    assert method._shares == pytest.approx(expected, abs=1e-5)
    for name in method._weights:
        weight = dict(context.backbone.named_parameters())[name]
        assert method._top.kept[name].shape[1] == int(method._shares[block_of(name)] * min(weight.shape))
    learned = end_phase(context, data)
    assert learned is not None and not method._top.names
    model = {context.backbone.exported_name(n) for n, p in context.backbone.named_parameters() if p.numel()}
    assert set(learned.model) == model, "frozen weights are exported too"
