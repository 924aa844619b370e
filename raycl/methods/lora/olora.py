"""O-LoRA (OIncLoRA): IncLoRA whose new adapter is pulled towards rows at right angles to all earlier ones.

    loss + lambda_1 * sum over linears of |A_old A_new^T|, all entries added up
         + lambda_2 * sum over linears of the Frobenius norms of A_new and of B_new

Wang et al. 2023, "Orthogonal Subspace Learning for Language Model Continual Learning" (Findings of EMNLP), as in their
code (src/uie_trainer_lora.py): the paper squares the entries of the product, the code adds up their absolute values;
what lambda_2 weighs is in the code only, the paper lists values of it (appendix). `lambda_1` 0.5 and
`lambda_2` 0 are theirs for the short orders. On long-C lambda_2 is 0.1 for copa, qqp, sst2, yahoo and boolq and 0.3 for
rte and wic, and lambda_1 is 5 from dbpedia on (`lambda_1_by_task`, `lambda_2_by_task`).
Earlier adapters are compared in the precision in which they are applied.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Output
from raycl.config import Tree
from raycl.methods.base import MethodConfig
from raycl.methods.lora.inclora import IncLora, IncLoraSettings
from raycl.types import Batch


class OLoraSettings(IncLoraSettings):
    """IncLoRA's settings with those of the penalty."""

    lambda_1: float = Field(0.5, ge=0, description="weight of the overlap between the new adapter and all earlier ones")
    lambda_1_by_task: dict[str, float] = Field(
        default_factory=dict, description="task name -> lambda_1, where it differs"
    )
    lambda_2: float = Field(0.0, ge=0, description="weight of the size of the new adapter")
    lambda_2_by_task: dict[str, float] = Field(
        default_factory=dict, description="task name -> lambda_2, where it differs"
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = (
        *IncLoraSettings.unused_for_single_task,
        "lambda_1",
        "lambda_1_by_task",
    )

    takes: ClassVar[tuple[str, ...]] = ("use_rslora", "alpha_pattern", "init_lora_weights=gaussian")
    """Overlaps are computed for linears of one shape together, which have one rank."""

    by_task: ClassVar[tuple[str, ...]] = ("lambda_1_by_task", "lambda_2_by_task")

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the settings that matter: the first task has no overlap; each has its lambda_1 and lambda_2."""
        settings = super().cache_key(index, tasks, learns_texts)
        settings["lambda_1"] = settings.pop("lambda_1_by_task").get(tasks[index], self.lambda_1)
        settings["lambda_2"] = settings.pop("lambda_2_by_task").get(tasks[index], self.lambda_2)
        if index == 0:
            del settings["lambda_1"]
        return settings


class OLoraConfig(OLoraSettings):
    """O-LoRA: IncLoRA with a penalty on the overlap with earlier adapters."""

    name: Literal["olora"] = "olora"


class OLora(IncLora):
    """IncLoRA with O-LoRA's penalty."""

    Config: ClassVar[type[MethodConfig]] = OLoraConfig

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return the penalty, which depends on parameters alone, so every step adds it once."""
        config = self.config
        lambda_1 = config.lambda_1_by_task.get(self._task, config.lambda_1)
        lambda_2 = config.lambda_2_by_task.get(self._task, config.lambda_2)
        terms = []
        if lambda_1 and self._learned and not self.task_id_given:
            terms.append(lambda_1 * self._overlap())
        if lambda_2:
            terms.append(lambda_2 * self._size())
        return torch.stack(terms).sum() if terms else None

    def _overlap(self) -> Tensor:
        """Return all linears of one shape at once; rows of the pool without an adapter are zero and add nothing."""
        total = torch.zeros((), device=self.backbone.device)
        self.stack.need(list(self._learned))
        for shape, paths in self.stack.pool.members.items():
            new_LrD = torch.stack([self.stack.layers[path].trainable()[0] for path in paths])
            total = total + abssum(self.stack.pool.a[shape], new_LrD)
        return total

    def _size(self) -> Tensor:
        parts = [part for layer in self.stack.layers.values() for part in layer.trainable()]
        return torch.stack([torch.linalg.vector_norm(part.float()) for part in parts]).sum()


def abssum(old_RD: Tensor, new_rD: Tensor) -> Tensor:
    """Return the sum of the absolute entries of `A_old A_new^T`; both may have a leading axis of linears."""
    return (old_RD.float() @ new_rD.float().mT).abs().sum()
