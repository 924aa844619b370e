"""Encoder-decoder backbones (T5 and its family)."""

from __future__ import annotations

import re

from torch import Tensor

from raycl.backbone.base import Backbone, GenerationInputs, Output, Side, summed_cross_entropy
from raycl.types import IGNORE, Batch

READS_SOURCE = re.compile(r"(EncDecAttention\.[kv]|(encoder_attn|cross_attn|crossattention)\.[kv]_proj)$")
"""Cross attention's keys and values: layers of the decoder that work on the encoder's positions (T5, BART)."""


class Seq2SeqBackbone(Backbone):
    """Source into the encoder, target from the decoder."""

    def forward(self, batch: Batch) -> Output:
        """Cross-entropy summed over target tokens (end-of-sequence included)."""
        labels_BT = _labels(batch)
        with self.precision():
            inputs, _ = self.prefixed(batch.source_ids, batch.source_mask)
            logits_BTV = self.model(**inputs, labels=labels_BT, use_cache=False).logits
        return Output(summed_cross_entropy(logits_BTV, labels_BT), logits_BTV)

    def side(self, path: str) -> Side:
        """The encoder and what the decoder makes of its states work on the source, all else on the target."""
        return "source" if re.search(r"(^|\.)encoder\.", path) or READS_SOURCE.search(path) else "target"

    def real_tokens(self, batch: Batch) -> dict[Side, Tensor]:
        """Source tokens, and the decoder's positions that have a target."""
        return {**super().real_tokens(batch), "target": (_labels(batch) != IGNORE) & (batch.weight > 0).unsqueeze(1)}

    def _encode(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        found: Tensor = self.model.get_encoder()(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        return found

    def generation_inputs(self, batch: Batch) -> GenerationInputs:
        """The source for the encoder; an answer follows the decoder's start token."""
        inputs, _ = self.prefixed(batch.source_ids, batch.source_mask)
        return GenerationInputs(dict(inputs), 1, 0, self.model.generation_config.forced_bos_token_id)


def _labels(batch: Batch) -> Tensor:
    """Targets `[B, T]`; a batch of fill-ups only has none, and the decoder still needs one position."""
    labels_BT = batch.target_ids
    return labels_BT if labels_BT.shape[1] else labels_BT.new_full((len(batch), 1), IGNORE)
