"""Encoder-only backbones (BERT, RoBERTa, MiniLM): pooled states into a growing label head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raycl.backbone.base import Backbone, Head, Output, summed_cross_entropy
from raycl.backbone.codec import HFCodec
from raycl.backbone.head import LabelHead
from raycl.types import Batch


class EncoderBackbone(Backbone):
    """Mean or first-token pooling of the last hidden states, then `LabelHead`."""

    def __init__(self, model: nn.Module, codec: HFCodec, pooling: str) -> None:
        super().__init__(model, codec)
        self.pooling = pooling
        self.head: Head = LabelHead(self.model.config.hidden_size)

    def learn_labels(self, labels: Sequence[str]) -> None:
        """Add head rows for labels not seen before."""
        self.head.grow(labels)

    def pooled(self, batch: Batch) -> Tensor:
        """Sentence states `[B, D]`; padding never takes part."""
        inputs, prefix = self.prefixed(batch.source_ids, batch.source_mask)
        if prefix:
            inputs["position_ids"] = self._positions(inputs["attention_mask"])
        states_BLD = self.model(**inputs).last_hidden_state[:, prefix:]
        if self.pooling == "cls":
            first: Tensor = states_BLD[:, 0]
            return first
        mask_BL1 = batch.source_mask.unsqueeze(-1).to(states_BLD.dtype)
        mean: Tensor = (states_BLD * mask_BL1).sum(1) / mask_BL1.sum(1).clamp(min=1)
        return mean

    def _positions(self, mask_BS: Tensor) -> Tensor:
        """Counted over real positions, so that a masked prefix moves nothing; RoBERTa starts behind its padding id."""
        embeddings = getattr(self.model, "embeddings", None)
        first = 0
        if hasattr(embeddings, "create_position_ids_from_input_ids"):
            first = int(embeddings.padding_idx) + 1  # type: ignore[union-attr]
        return (mask_BS.cumsum(1) - 1).clamp(min=0) + first

    def forward(self, batch: Batch) -> Output:
        """Cross-entropy over all labels seen so far, summed over examples."""
        with self.precision():
            logits_BC = self.head(self.pooled(batch))
        return Output(summed_cross_entropy(logits_BC, batch.label_ids), logits_BC)

    @torch.no_grad()
    def predict(self, batch: Batch, max_new_tokens: int) -> list[str]:
        """The label text with the largest score among all labels seen so far; "" where nothing is known of any."""
        with self.precision():
            best_B, row_B = self.head(self.pooled(batch)).float().max(-1)
        known = torch.isfinite(best_B).tolist()
        return [self.head.labels[row] if yes else "" for row, yes in zip(row_B.tolist(), known, strict=True)]
