"""ELLA: IncLoRA whose new update is held small at the entries where the sum of all earlier updates is large.

    loss + weight * sum over linears of || dW_t * W_past ||_F^2,  W_past = sum over i < t of dW_i

The product is taken entry by entry. The penalty alone shrinks entry ij of an update G to G_ij / (1 + weight E_ij^2)
with E = W_past: where earlier tasks have changed little, the new one is free, along earlier directions too, which
O-LoRA's penalty forbids (Das Biswas et al. 2026, "ELLA: Efficient Lifelong Learning for Adapters in Large Language
Models", EACL 2026, arXiv:2601.02232, section 3). The authors' code is not public. `weight` 5e5 is the value of a public
reproduction on most tasks of the long orders with T5-large, where single tasks have up to 5e7; entries of updates are
of the order of 1e-3, which is why it is large.

Deviations: dW is the update as it is applied, the scale `lora_alpha / r` included; whether the paper's has it is open,
and the penalty changes by the fourth power of it. W_past is formed anew of the earlier adapters in every step, layer by
layer, and not stored: nothing is kept in addition to IncLoRA's adapters, of which the paper keeps the sum alone.
Earlier adapters are taken in the precision in which they are applied.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Output
from raycl.methods.base import MethodConfig
from raycl.methods.lora.inclora import IncLora, IncLoraSettings
from raycl.types import Batch


class EllaConfig(IncLoraSettings):
    """ELLA: IncLoRA with a penalty on entries of the update where earlier ones are large."""

    name: Literal["ella"] = "ella"
    weight: float = Field(5e5, ge=0, description="lambda, the weight of the penalty")

    unused_for_single_task: ClassVar[tuple[str, ...]] = (*IncLoraSettings.unused_for_single_task, "weight")
    unused_in_first_phase: ClassVar[tuple[str, ...]] = ("weight",)


class Ella(IncLora):
    """IncLoRA with ELLA's penalty."""

    Config: ClassVar[type[MethodConfig]] = EllaConfig

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return the penalty, which depends on parameters alone, so every step adds it once."""
        if not self.config.weight or not self._learned or self.task_id_given:
            return None
        self.stack.need(list(self._learned))
        terms = []
        for path, layer in self.stack.layers.items():
            terms.append(alignment(*layer.trainable(), layer.update.scale, self._past(path)))
        weight: float = self.config.weight
        return weight * torch.stack(terms).sum()

    def _past(self, path: str) -> Tensor:
        """Return the sum of the updates of earlier tasks `[O, D]` of a linear."""
        shape, number = self.stack.pool.locations[path]
        names = list(self._learned)
        rows = [row for name in names for row in self.stack.table.rows[name]]
        scales = [self._learned[name].scale for name in names for _ in self.stack.table.rows[name]]
        low_RD, high_RO = (block[shape][number, rows].float() for block in (self.stack.pool.a, self.stack.pool.b))
        past: Tensor = (high_RO.T * torch.tensor(scales, device=high_RO.device)) @ low_RD
        return past


def alignment(low_RD: Tensor, high_OR: Tensor, scale: float, past_OD: Tensor) -> Tensor:
    """Return `|| scale B A * W ||_F^2`, entry by entry.

    Its gradients with regard to A and B are formed at once, so that no matrix of W's size is kept for the backward
    pass.
    """
    with torch.no_grad():
        low, high = low_RD.float(), high_OR.float()
        update_OD = scale * (high @ low)
        slope_OD = 2 * scale * update_OD * past_OD.square()
        to_low, to_high = high.T @ slope_OD, slope_OD @ low.T
        value = (update_OD * past_OD).square().sum()
    first_order = (to_low * low_RD).sum() + (to_high * high_OR).sum()
    return value + first_order - first_order.detach()
