"""SLAO: one LoRA for all tasks, each task's values merged into it with a weight that falls with the number of tasks.

Task i begins with what task i-1 was trained to, A orthonormal; what it was trained to is merged asymmetrically:

    begin:  Q R = A_{i-1}^T,  A <- Q^T,  B <- B_{i-1}
    end:    A_merge <- A_i,  B_merge <- B_merge + i^-1/2 (B_i - B_merge)

The first task is trained and kept as a LoRA is. Evaluation and serving use the merged adapter; training never begins
with the merged B. Three copies are kept, however many tasks there are: A and B as trained last, and the merged B (Qiao
and Mahdavi 2025, "Merge before Forget: A Single LoRA Continual Learning via Continual Merging", arXiv:2512.23017,
algorithm 1 and section 4). Rank 8 on query and value projections, a rate of 5e-5 and 5 epochs are those of the paper
for LLaMA-2, which does not give alpha; 32 is that of this project's other LoRAs. No code of the authors is public.

Deviations: QR leaves the signs of Q's columns open; those of R's diagonal are made positive, so that all machines begin
alike and A of orthonormal rows stays what it is. The paper has no label heads: the head of encoder-only backbones reads
what B writes, so its rows are begun and merged as B is, and rows of new labels are kept as they were trained.
`merge_exponent` is 1/2 in the paper; with 1 the merged B is the mean over tasks, with 0 that of the last task.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone
from raycl.errors import BackboneError
from raycl.methods.base import Learned, MethodConfig, State, under
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import BY_LINEAR, LoraSettings
from raycl.methods.single_adapter import Lora
from raycl.methods.trained_adapters import in_present_rows, known_labels
from raycl.types import Phase

TRAINED, MERGED = "slao/trained", "slao/merged"
"""Kinds of tensors of a state: values as the last task was trained to, and B and label head as merged."""


class SlaoConfig(LoraSettings, MethodConfig):
    """SLAO: one LoRA into which every task is merged."""

    name: Literal["slao"] = "slao"
    merge_exponent: float = Field(
        0.5, ge=0, description="B of task i, counted from 1, is merged with the weight i ** -merge_exponent"
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = ("merge_exponent",)
    unused_in_first_phase: ClassVar[tuple[str, ...]] = ("merge_exponent",)
    takes: ClassVar[tuple[str, ...]] = BY_LINEAR


class Slao(Lora):
    """One LoRA that begins each task orthonormal and keeps a merged B beside the trained one."""

    Config: ClassVar[type[MethodConfig]] = SlaoConfig
    adapter = "slao"

    def __init__(self, config: SlaoConfig, backbone: Backbone, seed: int) -> None:
        """Attach the adapter.

        Raises:
            BackboneError: the rank is larger than the inputs of an adapted linear, so that A has no orthonormal rows.
        """
        super().__init__(config, backbone, seed)
        self._tasks = 0
        self._labels: list[str] = []
        self._trained: dict[str, Tensor] = {}
        self._merged: dict[str, Tensor] = {}
        for path, layer in self.stack.layers.items():
            if layer.lora_A is not None and len(layer.lora_A) > layer.inputs:
                raise BackboneError(
                    f"method.r is {len(layer.lora_A)}, and '{path}' has {layer.inputs} inputs, so that A has no "
                    f"orthonormal rows: expected r up to {layer.inputs}"
                )

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Begin with the last task's trained values, A made orthonormal."""
        super().begin_task(phase, context)
        if not context.resumed:
            self._fill(
                {
                    name: orthonormal_rows(value) if name.endswith(".lora_A") else value
                    for name, value in in_present_rows(self._trained, self._labels, self.backbone).items()
                }
            )

    def _fill(self, values: Mapping[str, Tensor]) -> None:
        own = dict(self.backbone.named_parameters())
        for name, value in values.items():
            own[name].data.copy_(value)

    def end_task(self, context: TaskContext) -> Learned:
        """Merge what the task was trained to; the adapter holds the merged values until the next task begins."""
        self._tasks += 1
        trained = {name: value.float().cpu().clone() for name, value in context.parameters.items()}
        new = {name: value for name, value in trained.items() if not name.endswith(".lora_A")}
        weight = self._tasks**-self.config.merge_exponent
        rows = {name: torch.ones_like(value) for name, value in self._merged.items()}
        before, known = (in_present_rows(kept, self._labels, self.backbone) for kept in (self._merged, rows))
        self._merged = {
            name: value if name not in before else merged(value, before[name].cpu(), known[name].cpu(), weight)
            for name, value in new.items()
        }
        self._trained, self._labels = trained, known_labels(self.backbone)
        context.parameters = {**context.parameters, **self._merged}
        self._fill(self._merged)
        return super().end_task(context)

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        kinds = {TRAINED: self._trained, MERGED: self._merged}
        held = {f"{kind}/{name}": value for kind, kept in kinds.items() for name, value in kept.items()}
        return {**values, "slao": {"tasks": self._tasks, "labels": self._labels}}, tensors | held

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(values, tensors)
        self._tasks, self._labels = values["slao"]["tasks"], list(values["slao"]["labels"])
        self._trained, self._merged = (dict(under(f"{kind}/", tensors)) for kind in (TRAINED, MERGED))


def orthonormal_rows(low_RD: Tensor) -> Tensor:
    """Return an orthonormal basis `[r, D]` of the span of A's rows, by QR of its transpose with R's diagonal positive.

    Args:
        low_RD: A, with r <= D.
    """
    q_DR, r_RR = torch.linalg.qr(low_RD.double().T)
    signs_R = torch.where(r_RR.diagonal() < 0, -1.0, 1.0)
    rows: Tensor = (q_DR * signs_R).T.to(low_RD)
    return rows


def merged(new: Tensor, before: Tensor, known: Tensor, weight: float) -> Tensor:
    """Return B, or rows of the label head, with a task's values merged in.

    Args:
        new: as the task was trained to. before: as merged so far. known: 1 where there was a value before, else 0.
    """
    return new + known * (1 - weight) * (before - new)
