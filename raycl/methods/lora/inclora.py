"""IncLoRA: every task trains a LoRA of its own with the frozen ones of earlier tasks, and all of them are active.

O-LoRA's plain sum without its penalty ("IncLoRA" in MIGU, section 4.1, and in the tables of both papers): rank 8, alpha
32, query and value projections, as in the code of both. Their dropout of 0.1 is an option here and off, so that N
workers equal one. It drops inputs of the new adapter alone; theirs gives the same dropped inputs to the frozen ones.

The authors' models write their answers as text; an encoder-only backbone needs a label head, of which the papers say
nothing. It is treated like the weights: each task trains an increment, and logits are the sum of all increments. With
rows for every label seen so far (`head=shared`, the default) that is exactly the one growing head that keeps training,
as method `lora` has it, and yet nothing that an earlier snapshot holds changes. `head=own` trains rows of the task's
own labels only.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone
from raycl.methods.base import MethodConfig, in_head
from raycl.methods.lora_settings import BY_LINEAR, LoraSettings
from raycl.methods.per_task_adapter import AdapterForm, PerTaskAdapter
from raycl.types import Batch, Mixture, RouterState


class IncLoraSettings(LoraSettings, MethodConfig):
    """LoRA settings of every task's own adapter."""

    head: Literal["shared", "own"] = Field(
        "shared",
        description="rows of the label head that a task trains (encoder-only backbones): of all labels seen so far, or "
        "of its own labels",
    )
    stop_grad_old_blocks: bool = Field(
        False, description="stop gradients through earlier adapters into the layers below, as GainLoRA's code does"
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = ("stop_grad_old_blocks",)

    label_head: ClassVar[tuple[str, ...]] = ("head",)
    takes: ClassVar[tuple[str, ...]] = BY_LINEAR


class IncLoraConfig(IncLoraSettings):
    """IncLoRA: a LoRA for each task, and the sum of all answers."""

    name: Literal["inclora"] = "inclora"


class IncLora(PerTaskAdapter):
    """A growing sum of LoRAs, of which only the newest is trained.

    Where the task id is given (schedule `separate`), each adapter is trained and active alone.
    """

    Config: ClassVar[type[MethodConfig]] = IncLoraConfig
    starts_anew: ClassVar[bool] = True

    def __init__(self, config: IncLoraSettings, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed, self._adapter_form(config))
        self.stack.detach_loaded = config.stop_grad_old_blocks

    def _adapter_form(self, config: Any) -> AdapterForm:
        return AdapterForm(config.target_modules, config.scaling, "logit", parameters=config.target_parameters)

    def _create(self, task: str) -> None:
        self.config.begin_training(self.stack, [task], self._rank())

    def _rank(self) -> int:
        return int(self.config.r)

    def _head_labels(self, labels: list[str]) -> list[str]:
        head = self.backbone.head
        if head is None or self.task_id_given or self.config.head == "own":
            return labels
        return list(dict.fromkeys([*head.labels, *labels]))

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        return ".lora_" in name or in_head(name, parameter)

    def route(self, batch: Batch) -> Mixture:
        """Return every adapter so far with weight 1; only the newest where the task id is given."""
        names = [*self._learned, *([self._task] if self._task else [])]
        return Mixture.same(dict.fromkeys(names[-1:] if self.task_id_given else names, 1.0), len(batch))

    def _router(self) -> RouterState:
        """Return all adapters with weight 1, logits added up; the task's own adapter where the task id is given."""
        return RouterState("task" if self.task_id_given else "sum", {"head_rule": "logit"})
