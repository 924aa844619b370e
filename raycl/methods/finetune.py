"""Sequential fine-tuning of all weights (SeqFT, "FT" in MIGU, "Finetune" in SLM): the lower reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from raycl.methods.base import Learned, Method, MethodConfig, phase_labels
from raycl.types import Phase


class FinetuneConfig(MethodConfig):
    """All weights are trained on the tasks in turn."""

    name: Literal["finetune"] = "finetune"


class Finetune(Method):
    """Every weight is trained on every task in turn; nothing protects earlier tasks."""

    Config = FinetuneConfig

    def begin_task(self, phase: Phase, resumed: bool) -> None:
        """All parameters are live; the head gains the stage's labels."""
        self.backbone.learn_labels(phase_labels(phase))
        for parameter in self.backbone.parameters():
            parameter.requires_grad_(parameter.numel() > 0)  # a label head without labels is nothing to train

    def end_task(self, phase: Phase, tensors: Mapping[str, Tensor]) -> Learned:
        """The whole model under its Hugging Face names, the label head beside it."""
        exported = {self.backbone.exported_name(name): tensor for name, tensor in tensors.items()}
        head = self.backbone.head
        return Learned(model=exported, labels=[] if head is None else list(head.labels))
