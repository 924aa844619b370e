"""Sequential fine-tuning of all weights (SeqFT, "FT" in MIGU, "Finetune" in SLM): the lower reference."""

from typing import ClassVar, Literal

from raycl.methods.base import Learned, Method, MethodConfig, phase_labels
from raycl.methods.context import TaskContext
from raycl.methods.trained_adapters import whole_model
from raycl.types import Phase


class FinetuneConfig(MethodConfig):
    """All weights are trained on the tasks in turn."""

    name: Literal["finetune"] = "finetune"

    task_id_in_training: ClassVar[bool] = False


class Finetune(Method):
    """Every weight is trained on every task in turn; nothing protects earlier tasks."""

    Config: ClassVar[type[MethodConfig]] = FinetuneConfig
    trains_backbone = True
    compiles = True

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Train all parameters, and add the phase's labels to the head."""
        self.backbone.learn_labels(phase_labels(phase))
        for parameter in self.backbone.parameters():
            parameter.requires_grad_(parameter.numel() > 0)  # a label head without labels is nothing to train

    def end_task(self, context: TaskContext) -> Learned:
        """Return the whole model under its Hugging Face names, and the label head."""
        return whole_model(self.backbone, context.parameters)
