"""InfLoRA: how A is chosen, how the subspace of earlier inputs grows, and what that keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from phases import begin_phase, end_phase
from tiny import KINDS, Lab, exported, matrix, run, trace

from raycl.data.loader import Collate, eval_batches
from raycl.methods.base import activate_batch
from raycl.methods.lora.inflora import InfLora, Subspace, designed, grown_threshold, observed_inputs, outside
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))
Array = NDArray[np.float64]


def started(lab: Lab, kind: str = "bert", **settings: Any) -> tuple[InfLora, TrainingContext]:
    context, _ = build(lab.config(kind, {"name": "inflora", **settings}), WORLD)
    assert isinstance(context.method, InfLora)
    return context.method, context


def trained(context: TrainingContext, index: int) -> None:
    """Train a whole phase, whose B and label rows become random numbers."""
    begun = begin_phase(context, index)
    torch.manual_seed(index)
    for name, parameter in context.backbone.named_parameters():
        if ".lora_B" in name or name.startswith("head."):
            torch.nn.init.normal_(parameter, std=0.1)
    end_phase(context, begun)


# ---- the subspace --------------------------------------------------------------------------------------------------


def covariances(count: int, inputs: int = 12, rank: int = 5) -> list[Array]:
    """Return covariances of tasks whose inputs lie in a few directions each, of falling strength."""
    draw = np.random.default_rng(3)
    collected = []
    for _ in range(count):
        tokens = draw.normal(size=(40, rank)) * 0.6 ** np.arange(rank) @ draw.normal(size=(rank, inputs))
        collected.append(tokens.T @ tokens)
    return collected


def by_definition(before: Array, covariance: Array, threshold: float) -> Array:
    """Return the projector on the subspace after a task, from that before it: eigenvectors of R R^T one after another
    until the covariance projected on the subspace has the share `threshold` of its squared norm."""
    rest = covariance - before @ covariance
    _, vectors = np.linalg.eigh(rest @ rest.T)
    projector = before
    for vector in vectors.T[::-1]:
        if np.linalg.norm(projector @ covariance) ** 2 >= threshold * np.linalg.norm(covariance) ** 2:
            return projector
        projector = projector + np.outer(vector, vector)
    return projector


def projector(subspace: Subspace) -> Array:
    array: Array = subspace.basis.numpy() @ subspace.basis.numpy().T
    return np.eye(len(array)) - array if subspace.complement else array


@pytest.mark.parametrize("threshold", [0.6, 0.9, 0.995])
def test_the_subspace_grows_by_the_definition(threshold: float) -> None:
    expected, result = np.zeros((12, 12)), Subspace.empty(12)
    ranks = []
    for covariance in covariances(6):
        expected = by_definition(expected, covariance, threshold)
        result = result.grown(torch.from_numpy(covariance), threshold)
        np.testing.assert_allclose(projector(result), expected, atol=1e-7)
        assert result.basis.shape[1] <= 6, "the smaller of the two bases is stored"
        torch.testing.assert_close(result.basis.T @ result.basis, torch.eye(result.basis.shape[1], dtype=torch.float64))
        ranks.append(round(float(np.trace(expected))))
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]
    assert result.complement is (ranks[-1] > 6)


def test_at_threshold_one_all_inputs_are_in_the_subspace() -> None:
    result = Subspace.empty(12)
    for covariance in covariances(2):
        result = result.grown(torch.from_numpy(covariance), 1.0)
    inside = projector(result)
    assert round(float(np.trace(inside))) == 10, "directions without energy stay free"
    for covariance in covariances(2):
        np.testing.assert_allclose(inside @ covariance, covariance, atol=1e-5 * np.linalg.norm(covariance))
    full = result.grown(torch.eye(12, dtype=torch.float64), 1.0)
    assert projector(full) == pytest.approx(np.eye(12)) and full.basis.shape[1] == 0
    assert full.directions(torch.eye(12, dtype=torch.float64))[0].shape[1] == 0, "nothing is left for a later task"


def test_a_is_the_leading_directions_outside_the_subspace() -> None:
    first, second = (torch.from_numpy(covariance) for covariance in covariances(2))
    space = Subspace.empty(12).grown(first, 0.99)
    low = designed(space.directions(second)[0], 3).numpy()
    rest = second.numpy() - projector(space) @ second.numpy()
    _, vectors = np.linalg.eigh(rest @ rest.T)
    assert np.abs(low @ projector(space)).max() < 1e-9
    np.testing.assert_allclose(np.abs(low @ vectors[:, ::-1][:, :3]), np.eye(3) / np.sqrt(3), atol=1e-7)
    assert (low[np.arange(3), np.abs(low).argmax(1)] > 0).all()


def test_rows_without_a_direction_are_zero() -> None:
    low = designed(torch.eye(4, dtype=torch.float64)[:, :2], 3)
    assert low.shape == (3, 4) and not low[2].any() and bool(low[:2].any(1).all())


def test_the_threshold_grows_to_one(lab: Lab) -> None:
    method, _ = started(lab, threshold=0.9, threshold_tasks=4)
    first, tasks = method.config.threshold, method.config.threshold_tasks
    assert [grown_threshold(first, tasks, task) for task in range(6)] == pytest.approx([0.9, 0.925, 0.95, 0.975, 1, 1])


# ---- inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_those_of_real_tokens_alone(lab: Lab, kind: str) -> None:
    """A batch with padding and fill-ups gives the sum over its examples one by one."""
    method, context = started(lab, kind)
    trained(context, 0)
    begun = begin_phase(context, 1)
    covariances = method._covariances(begun)
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[1], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    with observed_inputs(context.backbone, method.stack.layers) as inputs, torch.no_grad():
        for batch in eval_batches(Collate([table], codec.pad_id, labels), 1):
            inputs.begin_batch(batch)
            with activate_batch(method, batch):
                context.backbone(batch)
    assert covariances.keys() == inputs.totals.keys() == method.stack.layers.keys()
    for path, total in covariances.items():
        assert bool(total.any())
        torch.testing.assert_close(total, inputs.totals[path], rtol=1e-4, atol=1e-4)
    assert not any(layer._forward_pre_hooks for layer in method.stack.layers.values())


# ---- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_task_acts_outside_the_inputs_of_earlier_ones(lab: Lab, kind: str) -> None:
    method, context = started(lab, kind, r=3, threshold=0.9)
    trained(context, 0)
    begin_phase(context, 1)
    nonzero = 0
    for path, layer in method.stack.layers.items():
        assert layer.lora_A is not None and not layer.lora_A.requires_grad
        inside = torch.from_numpy(projector(method._subspaces[path]))
        assert 0 < float(inside.trace()) < layer.inputs
        low = layer.lora_A.detach().double()
        nonzero += bool(low.any())
        assert float((low @ inside).abs().max()) < 1e-6
    assert nonzero


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_earlier_answers_stay_where_the_subspace_holds_all_their_inputs(lab: Lab, kind: str) -> None:
    """At threshold 1 a new adapter reads nothing of an earlier text: its outputs keep their values."""
    method, context = started(lab, kind, r=3, threshold=1.0, target_modules=["layer.0.*query|layers.0.*q_proj"])
    trained(context, 0)
    codec = context.backbone.codec
    table = context.stream.table(context.stream.tasks[0], "train", codec)
    labels = context.backbone.label_ids() if codec.needs_labels else None
    batch = next(iter(eval_batches(Collate([table], codec.pad_id, labels), 14)))

    def outputs(batch: Batch) -> torch.Tensor:
        context.backbone.eval()
        with torch.no_grad(), activate_batch(method, batch):
            if kind == "bert":
                return context.backbone.pooled(batch)  # type: ignore[no-any-return, operator]
            return context.backbone(batch).logits  # type: ignore[no-any-return]

    before = outputs(batch)
    begin_phase(context, 1)
    for layer in method.stack.layers.values():
        assert layer.lora_A is not None and layer.lora_B is not None and bool(layer.lora_A.any())
        torch.nn.init.ones_(layer.lora_B)
    torch.testing.assert_close(outputs(batch), before, atol=1e-4, rtol=1e-4)


def test_only_b_is_trained_and_a_is_published_as_it_was_chosen(lab: Lab) -> None:
    method, context = started(lab)
    begun = begin_phase(context, 0)
    low = {
        path: layer.lora_A.detach().clone() for path, layer in method.stack.layers.items() if layer.lora_A is not None
    }
    learned = end_phase(context, begun)
    assert not any(".lora_A" in name for name in begun.parameters if name not in {f"model.{p}.lora_A" for p in low})
    assert learned is not None and learned.router.kind == "sum"
    for path, (a, _) in learned.adapters["colour"].linears.items():
        assert torch.equal(a, low[path])


def finished(lab: Lab, folder: Path, method: Any) -> Storage:
    storage = Storage.at(folder)
    run(lab.config("bert", method), storage)
    return storage


def test_single_task_runs_have_no_subspace(lab: Lab, tmp_path: Path) -> None:
    other = finished(lab, tmp_path / "other", ("separate", {"name": "inflora", "threshold": 0.5}))
    result = finished(lab, tmp_path / "found", ("separate", "inflora"))
    assert trace(result) == trace(other) and matrix(result) == matrix(other) and exported(result) == exported(other)


# ---- A that is drawn -----------------------------------------------------------------------------------------------


def test_a_drawn_row_loses_what_lies_in_the_subspace() -> None:
    """A (I - M M^T), rows of norm 1 / sqrt(3), from either basis; what lies within becomes zero."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64))[0]
    drawn = torch.cat([torch.randn(3, 6), basis.T[:1].float()])
    expected = drawn.double() @ (torch.eye(6, dtype=torch.float64) - basis @ basis.T)
    expected = (expected / expected.norm(dim=1, keepdim=True) / 3**0.5)[:3]
    whole = torch.linalg.qr(torch.cat([basis, torch.randn(6, 4, dtype=torch.float64)], 1))[0]
    for subspace in (Subspace(basis), Subspace(whole[:, 2:], complement=True)):
        result = outside(drawn, subspace)
        torch.testing.assert_close(result[:3].double(), expected, atol=1e-6, rtol=1e-5)
        assert not bool(result[3].any())


def test_a_random_design_reads_no_inputs_of_the_task(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    method, context = started(lab, design="random")
    drawn = {}

    def covariances(self: InfLora, context: TrainingContext) -> dict[str, torch.Tensor]:
        raise AssertionError("the task's inputs were read")

    with monkeypatch.context() as patched:
        patched.setattr(InfLora, "_covariances", covariances)
        begun = begin_phase(context, 0)
    drawn = {path: low.clone() for path, low in method._low.items()}
    assert all(bool(low.any()) for low in drawn.values()), "the first task keeps what LoRA draws"
    end_phase(context, begun)
    begin_phase(context, 1)
    for path, low in method._low.items():
        assert not torch.equal(low, drawn[path])
        basis = method._subspace(path)
        inside = low.double().T - basis.without(low.double().T)
        assert float(inside.norm()) < 1e-4 * float(low.norm())
