"""LwF: on the new task's texts the model keeps answering as it did before the task.

    loss + weight * mean over loss positions of KL(softmax(z_old / T), softmax(z / T))

z are the logits of the present model, z_old those of the model as it was when the task began, on the same batch and
without dropout. Loss positions are the tokens of the answers; for encoder-only backbones examples, over the labels that
were known before the task (Li and Hoiem 2016, "Learning without Forgetting", eq. 3, whose T is 2; their loss is the
cross-entropy, which differs from KL by a constant). As in Avalanche `weight` is 1, and there is no factor T^2.
No earlier text is kept, and no second model (`raycl.methods.held_weights`).
Deviations: the paper trains new output rows alone at first (its warm-up). TRACE stores the last model's logits on all
batches before a task, in their order; it takes KL(new, old), sums over prompt and padding too, and divides by the batch
size.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from raycl.backbone import Backbone, Output
from raycl.backbone.base import loss_count
from raycl.methods.base import Learned, State
from raycl.methods.context import TaskContext
from raycl.methods.held_weights import HeldWeights
from raycl.methods.trained_adapters import known_labels
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Batch, Phase

HELD = "lwf/parameter"
"""Kind of the old values in checkpoints."""


class LwfConfig(WrapperConfig):
    """Any learner, distilled from the model before the task on the task's own texts."""

    name: Literal["lwf"] = "lwf"
    weight: float = Field(1.0, ge=0, description="alpha, the weight of the distillation")
    temperature: float = Field(2.0, gt=0, description="T, by which the logits of both models are divided")

    unused_in_first_phase: ClassVar[tuple[str, ...]] = ("weight", "temperature")

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Add the old model's pass at each step, without gradients, as if the first task had it too."""
        own: float = self.learner.extra_passes(epochs, steps)
        return own + 0.5

    def values_kept(self, tasks: int) -> int:
        """Return the old model's."""
        return min(1, tasks - 1)


class Lwf(Wrapper):
    """Any learner that trains one model for all labels, distilled from itself before the task."""

    Config = LwfConfig
    needs_shared = "adapters"
    replaces_parameters: ClassVar[bool] = True

    def __init__(self, config: LwfConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self._old = HeldWeights(backbone, self.learner)
        self._known: list[str] = []

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Keep the present model as the old one, where there are earlier tasks."""
        known = known_labels(self.backbone)
        self.learner.begin_task(phase, context)
        if context.resumed or not context.earlier_tasks or not self.config.weight:
            return
        self._known = known
        self._old.hold()

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return the loss of distillation from the old model, plus the learner's penalty."""
        others = self.learner.penalty(batch, output)
        if not self._old:
            return others
        old, new = self._old.output(batch).logits, output.logits
        if not batch.target_ids.shape[1]:  # a label head
            rows = self.backbone.label_ids()
            columns = torch.tensor([rows[label] for label in self._known], device=new.device)
            counted = batch.label_ids >= 0
            old, new = old[counted][:, columns], new[counted][:, columns]
        distance = divergence(old, new, self.config.temperature).sum() / max(loss_count(batch), 1)
        own: Tensor = self.config.weight * distance
        return own if others is None else own + others

    def end_task(self, context: TaskContext) -> Learned | None:
        """Drop the old model."""
        self._old.clear()
        self._known = []
        return self.learner.end_task(context)

    def state_dict(self) -> State:
        values, tensors = self.learner.state_dict()
        return {**values, "lwf": {"labels": self._known}}, tensors | self._old.tensors(HELD)

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.learner.load_state_dict(values, tensors)
        self._known = list(values["lwf"]["labels"])
        self._old.restore(HELD, tensors)


def divergence(old_MC: Tensor, new_MC: Tensor, temperature: float) -> Tensor:
    """Return `[M]`: KL(softmax(old / T), softmax(new / T)) in float32."""
    old_MC, new_MC = (log_softmax(logits.float() / temperature, dim=-1) for logits in (old_MC, new_MC))
    return kl_div(new_MC, old_MC, reduction="none", log_target=True).sum(-1)
