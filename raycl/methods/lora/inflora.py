"""InfLoRA: each task's LoRA acts in directions of its inputs that earlier tasks do not use; only B is trained.

Before a task, with C the uncentred covariance of a linear's inputs over the task's training tokens and M an
orthonormal basis of the subspace of earlier tasks' inputs:

    A_t = (first r left singular vectors of (I - M M^T) C)^T / sqrt(3), frozen

The forward pass adds up all adapters, as IncLoRA's. After the task DualGPM adds to M the leading left singular vectors
of (I - M M^T) C, with C of the trained model now, until M holds at least the share `threshold` of the energy of C (the
sum of its squared singular values). The threshold grows linearly to 1 over the tasks. Where M has more columns than
half the inputs, a basis of its orthogonal complement is stored instead (Liang and Li 2024, "InfLoRA: Interference-Free
Low-Rank Adaptation for Continual Learning", section 3 and the authors' code, methods/inflora.py; 0.995 and 15 tasks
are those of GainLoRA's code, which runs InfLoRA on language models).
As in their code, and unlike the paper's formulas, singular values are those of C, not of the inputs themselves.

Where GainLoRA's code runs InfLoRA alone (src/cl_trainer_inflora.py), A does not depend on the task's inputs
(`design=random`): the first task keeps A as LoRA draws it, a later one has A (I - M M^T) with rows of norm 1 / sqrt(3).
That code also stops gradients at earlier adapters (`stop_grad_old_blocks`).
InfLoRA's own code, for images, adapts keys and values at scale 1 and trains a classifier for each task over its classes
alone: `target_modules=[attention.key, attention.value]`, `lora_alpha` equal to `r`, `head=own` and
`train.label_loss=task`.

Deviations: the first task of both codes keeps one direction less than it takes to reach the threshold; here it keeps as
many as it takes, as all later tasks do. Directions without energy are never used: rows of A that lack one are zero.
Padding takes no part in C, where GainLoRA's code counts it. Each linear has the C and M of its own inputs; in that code
the value projection of a cross-attention has those of decoder states. Under schedule `separate` tasks do not know each
other's subspaces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from raycl.adapters.layer import StackedLora
from raycl.backbone import Backbone
from raycl.methods.base import Learned, MethodConfig, State, in_head, under
from raycl.methods.context import TaskContext
from raycl.methods.lora.inclora import IncLora, IncLoraSettings
from raycl.methods.token_sums import TokenSums
from raycl.types import Phase

NOISE = 1e-6
"""Singular values below this share of the covariance's norm are rounding errors: inputs are computed in float32."""


class InfLoraSettings(IncLoraSettings):
    """IncLoRA's settings with those of the subspaces."""

    threshold: float = Field(
        0.995, gt=0, le=1, description="share of the energy of the first task's inputs that its subspace holds"
    )
    threshold_tasks: int = Field(15, ge=1, description="number of tasks over which the threshold grows to 1")
    design: Literal["inputs", "random"] = Field(
        "inputs",
        description="A of a task. inputs: leading directions of its inputs outside the subspace (InfLoRA); random: as "
        "LoRA draws it, projected off the subspace (InfLoRA in GainLoRA's code)",
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = (
        *IncLoraSettings.unused_for_single_task,
        "threshold",
        "threshold_tasks",
    )

    takes: ClassVar[tuple[str, ...]] = ("use_rslora", "alpha_pattern")
    """A of every linear is designed, with one rank."""

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Add two passes without gradients, which read a task's inputs before and after its training."""
        return super().extra_passes(epochs, steps) + 1 / epochs


class InfLoraConfig(InfLoraSettings):
    """InfLoRA: IncLoRA whose A is frozen, outside the subspace of earlier tasks' inputs."""

    name: Literal["inflora"] = "inflora"


@dataclass(frozen=True)
class Subspace:
    """The subspace of earlier tasks' inputs.

    Attributes:
        basis: `[D, k]` orthonormal columns, float64 on the CPU. complement: they span what the subspace lacks.
    """

    basis: Tensor
    complement: bool = False

    @staticmethod
    def empty(inputs: int) -> Subspace:
        return Subspace(torch.zeros(inputs, 0, dtype=torch.float64))

    def without(self, values_DN: Tensor) -> Tensor:
        """Return the part of each column that lies outside the subspace."""
        basis = self.basis.to(values_DN.device)
        inside = basis @ (basis.T @ values_DN)
        return inside if self.complement else values_DN - inside

    def directions(self, covariance_DD: Tensor) -> tuple[Tensor, Tensor]:
        """Return left singular vectors `[D, n]` outside the subspace that hold energy, and their singular values
        `[n]`."""
        vectors, values, _ = torch.linalg.svd(self.without(covariance_DD))
        held = int((values > NOISE * torch.linalg.matrix_norm(covariance_DD)).sum())
        return vectors[:, :held], values[:held]

    def grown(self, covariance_DD: Tensor, threshold: float) -> Subspace:
        """Add the fewest leading directions with which it holds at least `threshold` of the covariance's energy."""
        total = float(covariance_DD.square().sum())
        vectors, values = self.directions(covariance_DD)
        lacking = float(self.without(covariance_DD).square().sum())
        count = 0
        while count < len(values) and total - lacking < threshold * total:
            lacking -= float(values[count]) ** 2
            count += 1
        new = vectors[:, :count].cpu()
        if not self.complement:
            both = torch.cat([self.basis, new], dim=1)
            return Subspace(torch.linalg.qr(both)[0]).smaller()  # without the rounding errors of many tasks
        left = self.basis.shape[1] - count
        outside, _, _ = torch.linalg.svd(self.basis - new @ (new.T @ self.basis), full_matrices=False)
        return Subspace(outside[:, :left], complement=True)

    def smaller(self) -> Subspace:
        """Return the basis of its complement, where that has fewer columns."""
        inputs, count = self.basis.shape
        if self.complement or 2 * count <= inputs:
            return self
        whole, _, _ = torch.linalg.svd(self.basis)
        return Subspace(whole[:, count:].contiguous(), complement=True)


class InfLora(IncLora):
    """IncLoRA with frozen A."""

    Config: ClassVar[type[MethodConfig]] = InfLoraConfig
    revisable: ClassVar[bool] = False  # subspaces hold the task's own inputs, to which its new A would be orthogonal

    def __init__(self, config: InfLoraSettings, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self._low: dict[str, Tensor] = {}
        self._subspaces: dict[str, Subspace] = {}

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        return ".lora_B" in name or in_head(name, parameter)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Choose A by the task's inputs or at random (`design`); B starts at zero."""
        super().begin_task(phase, context)
        if context.resumed:
            return
        if self.config.design == "random":
            drawn = {path: self._low_of(path).detach() for path in self.stack.layers}
            held = self._subspaces
            self._fill({path: outside(low, held[path]) if path in held else low for path, low in drawn.items()})
            return
        low = {
            path: designed(self._subspace(path).directions(covariance)[0], self.config.r)
            for path, covariance in self._covariances(context).items()
        }
        self._fill(low)

    def _low_of(self, path: str) -> nn.Parameter:
        """Return A `[r, D]` of a linear."""
        low = self.stack.layers[path].lora_A
        assert low is not None, "no adapter is in training"
        return low

    def _subspace(self, path: str) -> Subspace:
        return self._subspaces.get(path) or Subspace.empty(self.stack.layers[path].inputs)

    def _fill(self, low: Mapping[str, Tensor]) -> None:
        """Fill A of every linear, which the engine does not train and the checkpoint's parameters lack."""
        self._low = dict(low)
        for path, value in low.items():
            parameter = self._low_of(path)
            parameter.data.copy_(value)
            self._low[path] = parameter.detach().float().cpu().clone()

    def _covariances(self, context: TaskContext) -> dict[str, Tensor]:
        """Return the path -> `[D, D]` sum over the phase's training tokens of x x^T, over all workers. Collective."""
        with observed_inputs(self.backbone, self.stack.layers) as inputs:
            context.forward_pass(inputs.begin_batch)
        return {path: context.sum(total) for path, total in inputs.totals.items()}

    def end_task(self, context: TaskContext) -> Learned:
        """Return the subspace gains the task's inputs; the adapter is frozen and published."""
        if not self.task_id_given:
            threshold = grown_threshold(self.config.threshold, self.config.threshold_tasks, len(self._learned))
            for path, covariance in self._covariances(context).items():
                self._subspaces[path] = self._subspace(path).grown(covariance, threshold)
        low = {f"model.{path}.lora_A": value for path, value in self._low.items()}
        context.parameters = {**context.parameters, **low}
        self._low = {}
        return super().end_task(context)

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        values["complements"] = [path for path, subspace in self._subspaces.items() if subspace.complement]
        bases = {f"subspace/{path}": subspace.basis for path, subspace in self._subspaces.items()}
        return values, tensors | bases | {f"low/{path}": value for path, value in self._low.items()}

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(values, tensors)
        complements = set(values["complements"])
        bases = under("subspace/", tensors)
        self._subspaces = {path: Subspace(basis, path in complements) for path, basis in bases.items()}
        self._fill(under("low/", tensors))


def grown_threshold(first: float, tasks: int, task: int) -> float:
    """Return the threshold of a task, counted from 0: `first` grows linearly to 1 over so many tasks."""
    return min(1.0, first + (1 - first) * task / tasks)


def designed(directions_DN: Tensor, rank: int) -> Tensor:
    """Return a `[r, D]` from left singular vectors, strongest first; zero rows where there are fewer than r.

    1 / sqrt(3) is the expected norm of a row that is drawn as LoRA draws it. The sign of a vector is arbitrary: its
    largest entry is positive, so that all workers and machines agree.
    """
    vectors_RD = directions_DN[:, :rank].T
    largest = vectors_RD.gather(1, vectors_RD.abs().argmax(1, keepdim=True))
    low = vectors_RD.new_zeros(rank, directions_DN.shape[0])
    low[: len(vectors_RD)] = vectors_RD * largest.sign() / math.sqrt(3)
    return low


def outside(low_RD: Tensor, subspace: Subspace) -> Tensor:
    """Return rows `[r, D]` without their part in the subspace, of norm 1 / sqrt(3); rows within it become zero."""
    rest_DR = subspace.without(low_RD.double().T)
    norms_R = rest_DR.norm(dim=0)
    is_held = norms_R > NOISE * low_RD.double().norm(dim=1)
    rest: Tensor = torch.where(is_held, rest_DR / norms_R.clamp(min=1e-30) / math.sqrt(3), 0.0).T.to(low_RD)
    return rest


@contextmanager
def observed_inputs(backbone: Backbone, layers: Mapping[str, StackedLora]) -> Iterator[TokenSums]:
    """Add up x x^T `[D, D]` over the real tokens that these linears read, while the context is open."""
    sizes = {path: layer.inputs for path, layer in layers.items()}
    zeros = {path: torch.zeros(size, size, dtype=torch.float64, device=backbone.device) for path, size in sizes.items()}
    sums = TokenSums(backbone, zeros)

    def observe(path: str, linear: nn.Module, given: tuple[Tensor, ...]) -> None:
        tokens_ND = sums.real(path, given[0])
        sums.totals[path] += (tokens_ND.T @ tokens_ND).double()

    with ExitStack() as hooks:
        for path, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(observe, path)))
        yield sums
