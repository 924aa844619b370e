"""DAS: gradients are scaled down by how important their units are to earlier domains and to general knowledge.

    I = |tanh((g - mean g) / std g)| in each layer      g: mean gradient of a loss with regard to gates of ones
    gradient of a unit's weights *= 1 - max of I over general knowledge and earlier domains
    loss + contrast of (z_1, z_2) against (z_1, z_3)

Units are attention heads, inner units and outputs of feed-forward blocks. General knowledge is measured once, before
the first domain: g is the gradient of KL(p_1 | p_2) between two passes with dropout, p the softmax over the width of
the last hidden states. A domain is measured when it was learned, by its task loss. z_1 and z_2 are means of the last
hidden states of whole texts in two passes with dropout, z_3 those with units scaled by their importance; cosines are
divided by the temperature, and the loss is the cross-entropy of finding z_2.
Ke et al. 2023, "Continual Pre-training of Language Models" (ICLR), section 3; sizes and the temperature are those of
ContinualLM. `contrast=batch` is the paper's loss over the texts of the worker's micro-batch; `own` has each text's z_3
alone, so that results depend neither on the batch nor on the number of workers.
Where its code differs (networks/baselines/softmask.py, networks/posttrain/model.py):
- The softmax is over positions; head factors fall on the input side of queries, keys and values; gates of inner units
  stand in front of the activation; a domain's loss is computed on texts without hidden words; means take in padding.
- Both passes of general knowledge run without dropout (the models are as `from_pretrained` leaves them, `model.train()`
  is commented out), so p_1 = p_2, and what is standardized are rounding errors of a gradient of zero.
- Head factors scale the bias of the attention's output projection too, as if its outputs were heads. They are not: here
  that bias is trained in full, and of the projection's weight the columns that read a head are scaled.
- The gates' gradients are added up without being cleared between batches: batch i of n counts n - i + 1 times.
- z_1 and z_2 are of different texts, neighbours in the batch, where they should be two passes of one; all texts of all
  workers are compared.
AdamW divides gradients by their own size, so a factor that stays the same for a task changes its updates only through
epsilon; with train.optimizer=sgd it acts as a factor on the update.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax

from raycl.backbone import Backbone, Output
from raycl.backbone.base import mean_pooled, seed_all
from raycl.backbone.gates import Gate, GatePoint, gated
from raycl.config import Tree
from raycl.methods.base import Learned, MethodConfig, State
from raycl.methods.context import TaskContext
from raycl.methods.finetune import Finetune
from raycl.methods.masks.units import Sides, Units, parameters_of, units_of
from raycl.methods.queries import mean_by_positions
from raycl.types import Batch, Phase


class DasConfig(MethodConfig):
    """DAS: all weights are trained, with gradients scaled down where units are important to what was learned before."""

    name: Literal["das"] = "das"
    general: bool = Field(
        True, description="importance to general knowledge, before the first task; needs backbone.dropout above 0"
    )
    sample: int = Field(10_000, ge=1, description="training rows on which importance is measured")
    contrast: Literal["own", "batch", "none"] = Field(
        "own",
        description="what the contrastive loss compares a text with. own: with itself as its important units see it; "
        "batch: with all texts of the worker's micro-batch too, as in the paper; none: no such loss",
    )
    temperature: float = Field(0.05, gt=0, description="temperature of the contrastive loss")

    fixed_roles: ClassVar[tuple[str, ...]] = ("attention", "ffn")

    @property
    def needs_dropout(self) -> bool:
        """Return whether dropout is needed, as it is for general knowledge."""
        return self.general

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings without effect without a contrastive loss."""
        if self.contrast == "none":
            yield "temperature", "contrast=none"

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the settings that matter; without important units there is no contrast."""
        settings = super().cache_key(index, tasks, learns_texts)
        if index == 0 and not self.general:
            del settings["contrast"], settings["temperature"]
        return settings


class Das(Finetune):
    """Full fine-tuning behind soft masks.

    Attributes:
        importance: `[U]`, the largest so far of each unit, layer by layer; None: nothing was learned.
    """

    Config: ClassVar[type[MethodConfig]] = DasConfig
    compiles: ClassVar[bool] = False
    scales_gradients: ClassVar[bool] = True

    def __init__(self, config: DasConfig, backbone: Backbone, seed: int) -> None:
        """Find the units.

        Raises:
            ConfigError: the backbone's layers have no units of this kind.
        """
        super().__init__(config, backbone, seed)
        self.units: list[Units] = units_of(backbone.model, attention_outputs=False)
        ends = list(accumulate(unit.count for unit in self.units))
        self.slices: dict[GatePoint, slice] = {
            unit.gate_point: slice(end - unit.count, end) for unit, end in zip(self.units, ends, strict=True)
        }
        self.sides: dict[str, Sides] = parameters_of(backbone.model, self.units)
        self.importance: Tensor | None = None

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Measure importance to general knowledge, before the first task."""
        super().begin_task(phase, context)
        if self.config.general and context.is_trained and self.importance is None and not context.resumed:
            seed_all(self.seed, self.backbone.device)
            self._add(self._measured(context, self._disagreement))

    def end_task(self, context: TaskContext) -> Learned:
        """Return the importance to what was learned."""
        self._add(self._measured(context, lambda batch: self.backbone(batch).loss_sum))
        return super().end_task(context)

    def _measured(self, context: TaskContext, loss: Callable[[Batch], Tensor]) -> Tensor:
        """Return `[U]` importance by a loss, summed over the rows of a batch. Collective."""
        gates = {
            unit.gate_point: torch.ones(unit.count, device=self.backbone.device, requires_grad=True)
            for unit in self.units
        }

        with gated(self.backbone.model, self._gates(gates)):
            importance = context.gate_gradients(list(gates.values()), loss, self.config.sample)
        return torch.cat([standardized(gradient) for gradient in importance]).cpu()

    def _gates(self, values: Mapping[GatePoint, Tensor]) -> dict[GatePoint, Gate]:
        return {unit.gate_point: _constant(unit, values[unit.gate_point]) for unit in self.units}

    def _disagreement(self, batch: Batch) -> Tensor:
        """Return the KL divergence between two passes with dropout, summed over real tokens."""
        self.backbone.train()
        (first_BLD, mask_BL), (second_BLD, _) = self.backbone.text_states(batch), self.backbone.text_states(batch)
        first, second = log_softmax(first_BLD, -1), log_softmax(second_BLD, -1)
        token_BL = kl_div(second, first, reduction="none", log_target=True).sum(-1)
        return (token_BL * mask_BL * batch.weight[:, None]).sum()

    def _add(self, importance_U: Tensor) -> None:
        self.importance = importance_U if self.importance is None else torch.maximum(self.importance, importance_U)

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scale gradients by `1 - importance` of the unit of a row, or of the head that a column reads."""
        if self.importance is None:
            return gradients
        changed = dict(gradients)
        for name, sides in self.sides.items():
            gradient = changed.get(f"model.{name}")
            if gradient is None:
                continue
            if sides.rows is not None:
                free = 1 - sides.of_rows(self.importance[self.slices[sides.rows.gate_point]], len(gradient))
                free = free.view(-1, *(1,) * (gradient.dim() - 1))
            else:
                assert sides.columns is not None
                free = 1 - sides.columns.spread(self.importance[self.slices[sides.columns.gate_point]])
            changed[f"model.{name}"] = gradient * free.to(gradient)
        return changed

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return the contrastive loss: three passes. Each example counts by its loss positions, or all the same."""
        if self.importance is None or self.config.contrast == "none":
            return None
        first, second = self._features(batch), self._features(batch)
        now = self.importance.to(first.device)
        values = {point: now[where] for point, where in self.slices.items()}
        with gated(self.backbone.model, self._gates(values)), self.backbone.without_recomputation():
            third = self._features(batch)
        if self.config.contrast == "own":
            return mean_by_positions(contrast(first, second, third, self.config.temperature), batch)
        loss_B, count_B = contrast_in_batch(first, second, third, batch.weight > 0, self.config.temperature)
        total: Tensor = (loss_B * count_B).sum() / count_B.sum().clamp(min=1)
        return total

    def _features(self, batch: Batch) -> Tensor:
        """Return `[B, D]` means of the last hidden states over whole texts."""
        return mean_pooled(*self.backbone.text_states(batch))

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        return values, tensors if self.importance is None else tensors | {"importance": self.importance}

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(values, tensors)
        self.importance = tensors.get("importance")


def standardized(gradient_U: Tensor) -> Tensor:
    """Return the importance of one layer's units from their gradients; zero where all are the same."""
    deviation = gradient_U.std()
    if len(gradient_U) < 2 or float(deviation) == 0.0:
        return torch.zeros_like(gradient_U)
    return ((gradient_U - gradient_U.mean()) / deviation).tanh().abs()


def contrast(first_BD: Tensor, second_BD: Tensor, third_BD: Tensor, temperature: float) -> Tensor:
    """Return `[B]`: cross-entropy of finding an example's second features rather than its third, by its first."""
    cosines = [cosine_similarity(first_BD, other, dim=-1) for other in (second_BD, third_BD)]
    return -log_softmax(torch.stack(cosines, dim=1) / temperature, dim=1)[:, 0]


def contrast_in_batch(
    first_BD: Tensor, second_BD: Tensor, third_BD: Tensor, is_real_B: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return `[B]`: the same among the second and third features of all examples, and 1 for those that are real."""
    cosines_BK = torch.cat(
        [cosine_similarity(first_BD[:, None], other[None], dim=-1) for other in (second_BD, third_BD)], dim=1
    )
    scores_BK = (cosines_BK / temperature).masked_fill(~is_real_B.repeat(2)[None], -torch.inf)
    own_B = torch.arange(len(first_BD), device=first_BD.device)
    scores_BK = torch.where(is_real_B[:, None], scores_BK, torch.zeros_like(scores_BK))  # a batch of fill-ups alone
    return cross_entropy(scores_BK, own_B, reduction="none"), is_real_B.float()


def _constant(units: Units, values_U: Tensor) -> Gate:
    return lambda rows: units.spread(values_U)
