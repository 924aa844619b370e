"""Decoder-only backbones (LLaMA and the other causal language models).

Training packs prompt and answer into one right-padded row, loss on the answer only. Generation shifts the
padding to the left, so that every row continues at the same column.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raycl.backbone.base import Backbone, GenerationInputs, Guesses, Side
from raycl.backbone.positions import logits_at, loss_positions
from raycl.types import IGNORE, Batch


class CausalBackbone(Backbone):
    """Prompt, then answer, in one sequence."""

    def guesses(self, batch: Batch) -> Guesses:
        """Every token of the answers (end-of-sequence included), given all before it."""
        ids_BS, mask_BS, labels_BS = join(batch, self.codec.pad_id)
        next_BS = nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE)
        chosen_BS = loss_positions(next_BS)
        with self.precision():
            inputs, prefix = self.prefixed(ids_BS, mask_BS)
            chosen = nn.functional.pad(chosen_BS, (prefix, 0))
            logits_MV = logits_at(self.model, chosen, {**inputs, "use_cache": False}, self.every_position)
        return Guesses(logits_MV, next_BS[chosen_BS], chosen_BS.nonzero()[:, 0])

    def real_tokens(self, batch: Batch) -> dict[Side, Tensor]:
        """Prompt and answer as `join` packs them."""
        _, mask_BS, _ = join(batch, self.codec.pad_id)
        return {"source": (mask_BS > 0) & (batch.weight > 0).unsqueeze(1)}

    def _encode(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        body = self.model.base_model
        found: Tensor = body(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).last_hidden_state
        return found

    def generation_inputs(self, batch: Batch) -> GenerationInputs:
        """The prompt, padded on the left; answers follow it, unless the prompt is given as embeddings."""
        inputs, _ = self.prefixed(batch.source_ids, batch.source_mask)
        padded = pad_left(*inputs.values())
        prompt = 0 if "inputs_embeds" in inputs else batch.source_ids.shape[1]
        special = {"pad_token_id": self.codec.pad_id, "eos_token_id": self.codec.eos_id}
        return GenerationInputs({**dict(zip(inputs, padded, strict=True)), **special}, prompt, prompt)


def join(batch: Batch, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `source + target` without holes.

    Returns:
        ids, mask and labels, each `[B, S]` with S = longest source + target of the batch; labels are IGNORE
        on the source and on padding.
    """
    real_BT = batch.target_ids != IGNORE
    ids_BS = torch.cat([batch.source_ids, batch.target_ids.masked_fill(~real_BT, pad_id)], dim=1)
    mask_BS = torch.cat([batch.source_mask, real_BT.to(batch.source_mask.dtype)], dim=1)
    labels_BS = torch.cat([torch.full_like(batch.source_ids, IGNORE), batch.target_ids], dim=1)
    order_BS = torch.argsort(1 - mask_BS, dim=1, stable=True)  # real tokens first, their order kept
    longest = int(mask_BS.sum(1).max())
    return tuple(tensor.gather(1, order_BS)[:, :longest] for tensor in (ids_BS, mask_BS, labels_BS))  # type: ignore[return-value]


def pad_left(rows: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding of right-padded ids `[B, L]` or embeddings `[B, L, D]` to the left."""
    order_BL = torch.argsort(mask_BL, dim=1, stable=True)  # padding first, the order of real tokens kept
    index = order_BL if rows.dim() == 2 else order_BL.unsqueeze(-1).expand_as(rows)
    return rows.gather(1, index), mask_BL.gather(1, order_BL)
