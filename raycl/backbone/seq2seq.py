"""Encoder-decoder backbones (T5 and its family)."""

import re

from torch import Tensor

from raycl.backbone.base import Backbone, GenerationInputs, Guesses, Side
from raycl.backbone.positions import decoder_inputs, logits_at, loss_positions
from raycl.types import IGNORE, Batch

READS_SOURCE = re.compile(r"(EncDecAttention\.[kv]|(encoder_attn|cross_attn|cross_?attention)\.(k|v|key|value)_proj)$")
"""Cross attention's keys and values: layers of the decoder that work on the encoder's positions."""


class Seq2SeqBackbone(Backbone):
    """A backbone with an encoder for the source and a decoder for the target."""

    def guesses(self, batch: Batch) -> Guesses:
        """Return every target token (end-of-sequence included), given the source and all before it."""
        labels_BT = _labels(batch)
        chosen_BT = loss_positions(labels_BT)
        with self.precision():
            read, _ = self.prefixed(batch.source_ids, batch.source_mask)
            inputs = {**read, **decoder_inputs(self.model, labels_BT), "use_cache": False}
            logits_MV = logits_at(self.model, chosen_BT, inputs, self.every_position)
        return Guesses(logits_MV, labels_BT[chosen_BT], chosen_BT.nonzero()[:, 0])

    def side(self, path: str) -> Side:
        """Return the source for the encoder and for the decoder's projections of its states, else the target."""
        return "source" if re.search(r"(^|\.)encoder\.", path) or READS_SOURCE.search(path) else "target"

    def real_tokens(self, batch: Batch) -> dict[Side, Tensor]:
        """Return the source tokens, and the decoder's positions that have a target."""
        return {**super().real_tokens(batch), "target": (_labels(batch) != IGNORE) & (batch.weight > 0).unsqueeze(1)}

    def _encode(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        states: Tensor = self.model.get_encoder()(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        return states

    def generation_inputs(self, batch: Batch) -> GenerationInputs:
        """Return the source for the encoder; an answer follows the decoder's start token."""
        inputs, _ = self.prefixed(batch.source_ids, batch.source_mask)
        arguments = {**inputs, "eos_token_id": sorted(self.end_ids)}
        return GenerationInputs(arguments, 1, 0, self.model.generation_config.forced_bos_token_id)


def _labels(batch: Batch) -> Tensor:
    """Return targets `[B, T]`; a batch of fill-ups only has none, and the decoder still needs one position."""
    labels_BT = batch.target_ids
    return labels_BT if labels_BT.shape[1] else labels_BT.new_full((len(batch), 1), IGNORE)
