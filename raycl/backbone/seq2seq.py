"""Encoder-decoder backbones (T5 and its family)."""

from __future__ import annotations

import torch

from raycl.backbone.base import Backbone, Output, summed_cross_entropy
from raycl.types import IGNORE, Batch


class Seq2SeqBackbone(Backbone):
    """Source into the encoder, target from the decoder."""

    def forward(self, batch: Batch) -> Output:
        """Cross-entropy summed over target tokens (end-of-sequence included)."""
        labels_BT = batch.target_ids
        if labels_BT.shape[1] == 0:  # a batch of fill-ups only: the decoder still needs one position
            labels_BT = labels_BT.new_full((len(batch), 1), IGNORE)
        with self.precision():
            inputs, _ = self.prefixed(batch.source_ids, batch.source_mask)
            logits_BTV = self.model(**inputs, labels=labels_BT, use_cache=False).logits
        return Output(summed_cross_entropy(logits_BTV, labels_BT), logits_BTV)

    @torch.no_grad()
    def predict(self, batch: Batch, max_new_tokens: int) -> list[str]:
        """Greedy answers of at most `max_new_tokens` tokens."""
        with self.precision():
            inputs, _ = self.prefixed(batch.source_ids, batch.source_mask)
            ids_BT = self.model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
            )
        return self.codec.decode(ids_BT)
