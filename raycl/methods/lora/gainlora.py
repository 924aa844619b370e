"""GainLoRA: a LoRA for each task, of which a text gets as much as the task's gate lets through.

    y = W h + sum_i g_i s B_i A_i h,    u_i = SiLU(U_i SiLU(D_i e)),    g_i = |2 sigmoid(4 cos(k_i, u_i)) - 1|

e is the mean of the text's raw token embeddings; A_i and B_i are those of O-LoRA or InfLoRA (`base`). A task trains its
B (and A, with `base=olora`), D, U and k; all else is frozen. D and U begin as those of the task before. The new gate is
kept shut on texts of earlier tasks, without any of these texts (Liang et al. 2025, "Gated Integration of Low-Rank
Adaptation for Continual Learning of Language Models", section 3; code: src/cl_trainer_gainlora_inflora.py and
src/t5_large.py of liangyanshuo/gainlora at a47edf4):

- subspaces Q of earlier tasks' features, of e for D, of SiLU(D e) for U and of u for k, grow after each task as
  InfLoRA's do (`gate_threshold`; of the gate that was just trained);
- k begins in the direction that has most energy among the new task's u outside of Q, with the length of a drawn k;
- after every update of the optimizer its change is projected off Q, and rows get the length that the update gave them:

    W <- W_new - (W_new - W_old) Q Q^T,    then each row of W times |W_new row| / |W row|

So on features that Q holds, cos(k, u) changes only as far as rows of D and U are stretched; the length of k has no part
in it. The projection is a constraint on the update, not on the gradient (`Method.constraint`): under Adam these differ.

Deviations: e is a mean over the text's real tokens; the code divides by the padded length of the batch. The code stops
gradients at earlier adapters; here that is the option `stop_grad_old_blocks`. Features are those of all training rows
(the code: of about 1,000 batches at most). Subspaces of the first task hold the threshold's share, and each linear has
the A of its own inputs, as in `inflora`. Label rows of encoder-only backbones, of which the paper has none, are gated
like the weights. Where the task id is given (schedule `separate`) there are no gates.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.bank.tensor_groups import TensorGroups
from raycl.data.loader import batches_of
from raycl.methods.base import Learned, MethodConfig, RoutedConfig, State, check_prompts, under
from raycl.methods.context import TaskContext
from raycl.methods.lora.inclora import IncLora
from raycl.methods.lora.inflora import InfLora, InfLoraSettings, Subspace, designed, grown_threshold
from raycl.methods.lora.olora import OLora, OLoraSettings
from raycl.routing.gates import PARTS, TaskGates, features, mean_embedding, router_state
from raycl.types import Batch, Mixture, Phase, RouterState, Task

log: logging.Logger = logging.getLogger("raycl")

READ_AT_ONCE = 64
"""Prompts embedded together."""


class GainLoraConfig(OLoraSettings, InfLoraSettings, RoutedConfig):
    """GainLoRA: O-LoRA or InfLoRA with a gate for each task."""

    name: Literal["gainlora"] = "gainlora"
    base: Literal["olora", "inflora"] = Field("inflora", description="how a task's LoRA is trained")
    gate_width: int = Field(100, ge=1, description="p, the width of the layer inside a gate")
    gate_threshold: float = Field(
        0.995, gt=0, le=1, description="share of the energy of the first task's gate features that their subspaces hold"
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = (
        *OLoraSettings.unused_for_single_task,
        *InfLoraSettings.unused_for_single_task,
        "router_text",
        "gate_width",
        "gate_threshold",
    )

    chooses_task: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = InfLoraSettings.takes

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings of the other base; `threshold_tasks` is for gates too."""
        others = {
            "inflora": ("lambda_1", "lambda_1_by_task", "lambda_2", "lambda_2_by_task"),
            "olora": ("threshold", "design"),
        }
        yield from ((name, f"base={self.base}") for name in others[self.base])


class GainLora(OLora, InfLora):
    """A gated sum of LoRAs, of which only the newest and its gate are trained."""

    Config: ClassVar[type[MethodConfig]] = GainLoraConfig
    revisable: ClassVar[bool] = False  # subspaces hold the task's own features, to which its new gate would be shut

    def __init__(self, config: GainLoraConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        width = int(backbone.model.get_input_embeddings().weight.shape[1])
        self.gates: TaskGates = TaskGates(width, config.gate_width, backbone.device)
        self.router_module = self.gates
        backbone.add_module("gates", self.gates)
        self.spaces: FeatureSubspaces = FeatureSubspaces()
        self.constraint = self.spaces

    def check(self, tasks: Sequence[Task]) -> None:
        super().check(tasks)
        check_prompts(self.config.name, tasks)

    def _create(self, task: str) -> None:
        super()._create(task)
        if not self.task_id_given:
            self.gates.begin(task, self.seed + self._number())

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        if name.startswith("gates."):
            return True
        if self.config.base == "olora":
            return IncLora._is_trained(self, name, parameter)
        return super()._is_trained(name, parameter)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """LoRA as its base begins it; k lies outside the features of earlier tasks."""
        super().begin_task(phase, context)
        if context.resumed or self.task_id_given:
            return
        key = self.gates.key
        assert key is not None, "no gate is in training"
        own = {part: getattr(self.gates, part).detach() for part in PARTS}
        covariance = self._covariances_of(context, own)["key"]
        directions, _ = self.spaces.of("key", len(covariance)).directions(covariance)
        if not directions.shape[1]:
            log.warning(
                "features of task '%s' lie within those of earlier tasks: its gate begins at random and may be open on "
                "their texts",
                phase.tasks[0].name,
            )
        else:
            first_D = designed(directions, 1)[0].to(key)
            key.data.copy_(first_D * (key.norm() / first_D.norm()))

    def _covariances(self, context: TaskContext) -> dict[str, Tensor]:
        return {} if self.config.base == "olora" else super()._covariances(context)

    @torch.no_grad()
    def _covariances_of(self, context: TaskContext, gate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of a gate -> `[D, D]` float64 sum of x x^T over what it reads of the phase's training
        prompts.

        Every worker reads all of them, so that all agree to the bit.
        """
        covariances = {part: torch.zeros((), dtype=torch.float64, device=self.backbone.device) for part in PARTS}
        backbone = self.backbone
        for batch in batches_of(context.routed_ids("train"), READ_AT_ONCE, backbone.codec.pad_id, backbone.device):
            mean_BD = self._mean(batch)
            low_B1P, high_B1D = features(mean_BD, *(gate[part].to(mean_BD)[None] for part in ("down", "up")))
            for part, seen in zip(PARTS, (mean_BD, low_B1P[:, 0], high_B1D[:, 0]), strict=True):
                covariances[part] = covariances[part] + seen.double().T @ seen.double()
        return covariances

    def _mean(self, batch: Batch) -> Tensor:
        ids_BL, mask_BL = batch.routed
        return mean_embedding(self.backbone.embedded(ids_BL), mask_BL)

    def route(self, batch: Batch) -> Mixture:
        """Return all adapters by their gates; the task's own where the task id is given."""
        if self.task_id_given:
            return super().route(batch)
        return Mixture(self.gates.names, self.gates(self._mean(batch)))

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return O-LoRA's penalty with `base=olora`."""
        return super().penalty(batch, output) if self.config.base == "olora" else None

    def end_task(self, context: TaskContext) -> Learned:
        """Gate and adapter are frozen; subspaces gain the task's features."""
        if not self.task_id_given:
            trained = {part: context.parameters[f"gates.{part}"] for part in PARTS}
            threshold = grown_threshold(self.config.gate_threshold, self.config.threshold_tasks, len(self._learned))
            for part, covariance in self._covariances_of(context, trained).items():
                self.spaces.set(part, self.spaces.of(part, len(covariance)).grown(covariance, threshold))
            self.gates.end(trained)
        return super().end_task(context)

    def _router(self) -> RouterState:
        """Return the gates; the task's own adapter where the task id is given."""
        return super()._router() if self.task_id_given else router_state(self.gates, {"head_rule": "logit"})

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        values["gates"] = list(self.gates.frozen)
        values["feature_complements"] = [part for part, subspace in self.spaces.held.items() if subspace.complement]
        kept = {f"gate/{task}/": held for task, held in self.gates.frozen.items()}
        bases = {f"feature/{part}": subspace.basis for part, subspace in self.spaces.held.items()}
        return values, tensors | TensorGroups(kept) | bases

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.gates.freeze({task: under(f"gate/{task}/", tensors) for task in values["gates"]})
        for part, basis in under("feature/", tensors).items():
            self.spaces.set(part, Subspace(basis, part in values["feature_complements"]))
        super().load_state_dict(values, tensors)

    @classmethod
    def _without(cls, values: dict[str, Any], left: TensorGroups, task: str, adapters: Collection[str]) -> State:
        """Remove the task's gate; subspaces still hold its features."""
        left = left.select(lambda name: not name.startswith(f"gate/{task}/"))
        return {**values, "gates": [name for name in values["gates"] if name != task]}, left


class FeatureSubspaces:
    """Subspaces of what the parts of gates read of earlier tasks; updates of the parts keep off them.

    A `Constraint`.

    Attributes:
        held: part -> its subspace.
    """

    def __init__(self) -> None:
        self.held: dict[str, Subspace] = {}
        self._there: dict[str, Subspace] = {}

    def of(self, part: str, inputs: int) -> Subspace:
        """Return the subspace of a part; it is empty before the first task has ended."""
        return self.held.get(part) or Subspace.empty(inputs)

    def set(self, part: str, space: Subspace) -> None:
        self.held[part] = space
        self._there = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the gate's parameters, once a task was learned."""
        return tuple(f"gates.{part}" for part in self.held)

    def __call__(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """Return the projected update, with rows as long as after it."""
        projected = self.projected(name, before, after).reshape(-1, after.shape[-1])
        lengths = torch.linalg.vector_norm(after.double().reshape(projected.shape), dim=1, keepdim=True)
        own = torch.linalg.vector_norm(projected, dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        stretched: Tensor = projected * (lengths / own)
        return stretched.reshape(after.shape).to(after.dtype)

    def projected(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """Return `W_new - (W_new - W_old) Q Q^T`, float64."""
        part, device = name.rpartition(".")[2], after.device
        if part not in self._there or self._there[part].basis.device != device:
            self._there[part] = replace(self.held[part], basis=self.held[part].basis.to(device))
        change = (after.double() - before.double()).reshape(-1, after.shape[-1])
        projected: Tensor = before.double() + self._there[part].without(change.T).T.reshape(after.shape)
        return projected
