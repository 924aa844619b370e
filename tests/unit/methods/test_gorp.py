"""GORP: its weights by the update rule, what bases keep gradients off, and the rank of an update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import KINDS, Lab, run
from torch import Tensor

from raycl.errors import BackboneError, ConfigError
from raycl.methods.lora.gorp import Gorp, GradientSpaces, grown, leading_rows, without
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))
Array = NDArray[np.float64]
BOTH_WAYS = {"name": "gorp", "r": 5, "full_modules": ["ffn.in", "ffn.out"], "full_scale": 0.5, "projection_rank": 3}
"""Full weights with more rows than columns, and with more columns than rows."""
EPSILON = 1e-4
"""Adam's, so large that rounding errors of gradients near zero do not become whole steps."""


@dataclass
class Seen:
    """What a run's steps were given: the values that each task's A begin with, and gradients before the method changes
    them, and what it makes of them.

    Attributes:
        starts: of each task, parameter -> value. steps: of each task, of each step, both by parameter.
    """

    starts: list[dict[str, Tensor]] = field(default_factory=list)
    steps: list[list[tuple[dict[str, Tensor], dict[str, Tensor]]]] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    record, begin, transform = Seen(), Gorp.begin_task, Gorp.transform_gradients

    def begins(self: Gorp, phase: Any, context: Any) -> None:
        begin(self, phase, context)
        record.starts.append({name: p.detach().clone() for name, p in self.backbone.named_parameters()})
        record.steps.append([])

    def transforms(self: Gorp, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {name: gradient.clone() for name, gradient in gradients.items()}
        changed = transform(self, gradients)
        record.steps[-1].append((given, {name: gradient.clone() for name, gradient in changed.items()}))
        return changed

    monkeypatch.setattr(Gorp, "begin_task", begins)
    monkeypatch.setattr(Gorp, "transform_gradients", transforms)
    yield record


def trained(lab: Lab, folder: Path, kind: str, settings: dict[str, Any], **train: Any) -> Gorp:
    config = lab.config(kind, settings, train={"max_grad_norm": 0, **train})
    method = run(config, Storage.at(folder)).context.method
    assert isinstance(method, Gorp)
    return method


# ---- the update rule ------------------------------------------------------------------------------------------------


@dataclass
class GaloreAdam:
    """One parameter of the authors' optimizer, by its formulas, in float64.

    Attributes:
        rank: dimensions of its projection; 0: it has none. gap: steps after which that is renewed.
        rate: learning rate. scale: factor of what is projected back. basis: M.
    """

    value: Array
    rank: int
    gap: int
    rate: float
    scale: float
    basis: Array
    projection: Array = field(default_factory=lambda: np.zeros((0, 0)))
    moment: Array | float = 0.0
    second: Array | float = 0.0
    steps: int = 0

    def step(self, gradient: Array) -> None:
        low = gradient
        if self.rank:
            if self.steps % self.gap == 0:
                right = np.linalg.svd(gradient, full_matrices=False)[2][: self.rank]
                signs = [np.sign(row[np.argmax(np.abs(row))]) for row in right]
                self.projection = right * np.array(signs)[:, None]
            low = gradient @ self.projection.T
        self.steps += 1
        low = low - self.basis @ self.basis.T @ low
        self.moment = 0.9 * self.moment + 0.1 * low
        self.second = 0.999 * self.second + 0.001 * low**2
        first, second = self.moment / (1 - 0.9**self.steps), self.second / (1 - 0.999**self.steps)
        update = first / (np.sqrt(second) + EPSILON)
        self.value = self.value - self.rate * (self.scale * update @ self.projection if self.rank else update)

    def next_basis(self, energy: float) -> Array:
        """Return M and the directions of the moment outside of it, one after another until it holds the share."""
        basis, total = self.basis, np.square(self.moment).sum()
        rest = self.moment - basis @ basis.T @ self.moment
        for direction in np.linalg.svd(rest, full_matrices=False)[0].T:
            held = total - np.square(self.moment - basis @ basis.T @ self.moment).sum()
            if held >= energy * total:
                break
            basis = np.column_stack([basis, direction])
        return basis


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_bases_are_those_of_the_update_rule(lab: Lab, tmp_path: Path, seen: Seen, kind: str) -> None:
    """Two tasks with Adam: the gradients of the run, and everything else made anew of them."""
    settings = {**BOTH_WAYS, "projection_steps": 2, "energy": 0.8}
    method = trained(lab, tmp_path, kind, settings, learning_rate=0.01, epsilon=EPSILON)
    bases: dict[str, Array] = {}
    values: dict[str, Array] = {}
    for task, start, steps in zip(("colour", "animal"), seen.starts, seen.steps, strict=True):
        assert len(steps) == 4
        names = [name for name in steps[0][0] if name.endswith(".lora_A") or name in method._full]
        for name in names:
            is_full = name in method._full
            is_wide = is_full and start[name].shape[0] < start[name].shape[1]
            first = values[name] if is_full and name in values else start[name].double().numpy()
            first = first.T if is_wide else first
            before = bases.get(name, np.zeros((len(first), 0)))
            mine = GaloreAdam(first, 3 if is_full else 0, 2, 0.01, 0.5, before)
            for given, _ in steps:
                gradient = given[name].double().numpy()
                mine.step(gradient.T if is_wide else gradient)
            values[name], bases[name] = (mine.value.T if is_wide else mine.value), mine.next_basis(0.8)
            if not is_full:
                low = method._learned[task].linears[name.removeprefix("model.").removesuffix(".lora_A")][0]
                np.testing.assert_allclose(low.numpy(), mine.value, atol=1e-5)
    own = dict(method.backbone.named_parameters())
    shapes = {own[name].shape[0] > own[name].shape[1] for name in method._full}
    assert shapes == {True, False} and len(bases) > len(method._full)
    for name in method._full:
        np.testing.assert_allclose(own[name].detach().numpy(), values[name], atol=2e-5)
        assert np.abs(values[name] - seen.starts[0][name].numpy()).max() > 1e-3
    for name, basis in bases.items():
        theirs = method._spaces.bases[name].double().numpy()
        assert theirs.shape == basis.shape
        np.testing.assert_allclose(theirs @ theirs.T, basis @ basis.T, atol=1e-3)


# ---- what it promises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_task_keeps_off_the_first_ones_gradients(lab: Lab, tmp_path: Path, seen: Seen, kind: str) -> None:
    """With plain SGD updates are multiples of gradients, so that full weights do not move within the basis either."""
    kept: dict[str, Tensor] = {}
    end = GradientSpaces.end_task

    def ends(self: GradientSpaces, energy: float) -> None:
        end(self, energy)
        kept.update({name: basis.clone() for name, basis in self.bases.items() if name not in kept})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientSpaces, "end_task", ends)
        method = trained(lab, tmp_path, kind, BOTH_WAYS, optimizer="sgd", learning_rate=0.5)
    own, moved = dict(method.backbone.named_parameters()), 0
    for name in method._full:
        update = (own[name] - seen.starts[1][name]).detach()
        update = update if update.shape[0] >= update.shape[1] else update.T
        assert 0 < kept[name].shape[1] < len(update)
        assert float((kept[name].T @ update).norm()) < 1e-3 * float(update.norm()) + 1e-7
        moved += int(update.abs().max() > 1e-5)
    assert moved == len(method._full)
    low = [name for name in kept if name.endswith(".lora_A")]
    for given, changed in seen.steps[1]:
        for name in low:
            torch.testing.assert_close(changed[name], without(kept[name], given[name]))
            assert float((kept[name].T @ changed[name]).norm()) <= 1e-4 * float(given[name].norm())
    assert low and any(float(changed[name].norm()) > 0 for _, changed in seen.steps[1] for name in low)


@pytest.mark.parametrize(("gap", "windows"), [(4, 1), (2, 2)])
def test_updates_of_a_window_have_the_projections_rank(
    lab: Lab, tmp_path: Path, seen: Seen, gap: int, windows: int
) -> None:
    settings = {**BOTH_WAYS, "projection_steps": gap}
    method = trained(lab, tmp_path, "bert", settings, learning_rate=0.01)
    for name in method._full:
        values = np.linalg.svd((seen.starts[1][name] - seen.starts[0][name]).double().numpy(), compute_uv=False)
        assert 3 * (windows - 1) < int((values > 1e-3 * values[0]).sum()) <= 3 * windows


def test_bases_grow_to_the_energy_and_no_further() -> None:
    draw = torch.Generator().manual_seed(0)
    basis = torch.zeros(12, 0)
    for _ in range(4):
        moment = torch.randn(12, 5, generator=draw) * 0.5 ** torch.arange(5)
        held = float(1 - without(basis, moment).square().sum() / moment.square().sum())
        wider = grown(basis, moment, 0.9)
        torch.testing.assert_close(wider.T @ wider, torch.eye(wider.shape[1]), atol=1e-6, rtol=0)
        torch.testing.assert_close(without(wider, basis), torch.zeros_like(basis), atol=1e-6, rtol=0)
        rest = float(without(wider, moment).square().sum() / moment.square().sum())
        assert rest <= 0.1 and (held < 0.9) is (wider.shape[1] > basis.shape[1])
        if wider.shape[1] > basis.shape[1]:  # with one direction less it lacks some
            added = without(basis, moment).double()
            values = torch.linalg.svdvals(added).square() / moment.double().square().sum()
            assert rest + float(values[wider.shape[1] - basis.shape[1] - 1]) > 0.1
        basis = wider
    assert grown(basis, torch.zeros(12, 5), 0.9).shape == basis.shape, "no gradient, nothing to keep off"
    whole = grown(basis, torch.randn(12, 12, generator=draw), 1.0)
    assert whole.shape == (12, 12) and grown(whole, torch.randn(12, 3, generator=draw), 1.0).shape == (12, 12)


def test_a_gradient_that_is_not_finite_reaches_the_step_as_it_is() -> None:
    gradient = torch.full((4, 3), float("nan"))
    assert bool(torch.isfinite(leading_rows(gradient, 2)).all())
    assert bool(GradientSpaces(2, 1.0).in_columns("w", gradient, True)[:, :2].isnan().all())


def test_a_linear_is_trained_in_full_or_has_an_adapter(lab: Lab) -> None:
    with pytest.raises(BackboneError, match=r"query' is in method.full_modules and in method.target_modules"):
        build(lab.config("bert", {"name": "gorp", "full_modules": "attention"}), WORLD)


@pytest.mark.parametrize("method", ["agem", "gem", "ogd", "ewc"])
def test_methods_that_read_gradients_have_another_learner(lab: Lab, method: str) -> None:
    with pytest.raises(ConfigError, match=f"method.learner is gorp, which projects .* method '{method}' takes them"):
        build(lab.config("bert", {"name": method, "learner": "gorp"}), WORLD)


def test_weight_decay_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"train.weight_decay is 0.1, and method 'gorp' keeps weights"):
        check(lab.config("bert", "gorp", train={"weight_decay": 0.1}))
    with pytest.raises(ConfigError, match=r"train.weight_decay is 0.1, and method 'gorp' keeps weights"):
        check(lab.config("bert", {"name": "replay", "learner": {"name": "gorp"}}, train={"weight_decay": 0.1}))
