"""Decoder-only backbones (LLaMA and the other causal language models).

Prompt and answer are joined in one right-padded row, loss on the answer only; in training, several examples may share a
row. Generation shifts the padding to the left, so that every row continues at the same column.
"""

import torch
from torch import Tensor, nn

from raycl.backbone.base import Backbone, GenerationInputs, Guesses, Side, evaluating, real_first
from raycl.backbone.positions import PackedRows, logits_at, loss_positions, pack
from raycl.errors import BackboneError
from raycl.types import IGNORE, Batch

_NOT_PACKED, _NO_PACKING = "train.packing is true, but", ": set train.packing to false"


class CausalBackbone(Backbone):
    """A backbone whose prompt and answer are one sequence."""

    def guesses(self, batch: Batch) -> Guesses:
        """Return every token of the answers (end-of-sequence included), given all before it."""
        guesses = self._guesses_behind_suffix(batch)
        if guesses is not None:
            return guesses
        ids_BS, mask_BS, labels_BS = join(batch, self.codec.pad_id)
        next_BS = nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE)
        packed = self._packed(mask_BS)
        if packed is not None:
            next_BS = packed.take(next_BS, IGNORE)
        chosen_BS = loss_positions(next_BS)
        rows, columns = chosen_BS.nonzero(as_tuple=True)
        with self.precision():
            if packed is not None:
                ids_PS = packed.take(ids_BS, self.codec.pad_id)
                inputs, prefix = {"input_ids": ids_PS, "position_ids": packed.positions}, 0
            else:
                inputs, prefix = self.prefixed(ids_BS, mask_BS)
            chosen = nn.functional.pad(chosen_BS, (prefix, 0))
            logits_MV = logits_at(self.model, chosen, {**inputs, "use_cache": False}, self.every_position)
        return Guesses(logits_MV, next_BS[rows, columns], rows if packed is None else packed.examples[rows, columns])

    def _guesses_behind_suffix(self, batch: Batch) -> Guesses | None:
        """Return `guesses` where soft prompts stand between prompt and answer; None where there are none."""
        inputs, _ = self.prefixed(batch.source_ids, batch.source_mask) if self.suffix is not None else ({}, 0)
        if "inputs_embeds" not in inputs:
            return None
        real_BT = batch.target_ids != IGNORE
        written = self.model.get_input_embeddings()(batch.target_ids.masked_fill(~real_BT, self.codec.pad_id))
        embeds = torch.cat([inputs["inputs_embeds"], written], dim=1)
        mask = torch.cat([inputs["attention_mask"], real_BT.to(batch.source_mask.dtype)], dim=1)
        labels = nn.functional.pad(batch.target_ids, (inputs["attention_mask"].shape[1], 0), value=IGNORE)
        order_BS = real_first(mask)[:, : int(mask.sum(1).max())]
        next_BS = nn.functional.pad(labels.gather(1, order_BS)[:, 1:], (0, 1), value=IGNORE)
        chosen_BS = loss_positions(next_BS)
        rows, columns = chosen_BS.nonzero(as_tuple=True)
        embeds = embeds.gather(1, order_BS.unsqueeze(-1).expand(-1, -1, embeds.shape[2]))
        given = {"inputs_embeds": embeds, "attention_mask": mask.gather(1, order_BS), "use_cache": False}
        with self.precision():
            logits_MV = logits_at(self.model, chosen_BS, given, self.every_position)
        return Guesses(logits_MV, next_BS[rows, columns], rows)

    def _packed(self, mask_BS: Tensor) -> PackedRows | None:
        """Return the positions of joined rows; None where each example has its own row."""
        if not self.packs or not self.training:
            return None
        assert self.prefix is None and self.suffix is None, "packed rows have no room for soft prompts"
        # FlashAttention's interface finds packed examples in a batch of one row only
        in_one_row = "flash" in str(self.model.config._attn_implementation)
        return pack(mask_BS.sum(1).tolist(), mask_BS.device, in_one_row)

    def examples_in_rows(self, batch: Batch) -> Tensor | None:
        """Return the example of each position, where `packs` is set in training."""
        packed = self._packed(join(batch, self.codec.pad_id)[1])
        return None if packed is None else packed.examples

    def real_tokens(self, batch: Batch) -> dict[Side, Tensor]:
        """Return the prompt and answer as `join` puts them into one row, and rows as they are packed."""
        _, mask_BS, _ = join(batch, self.codec.pad_id)
        real_BS = (mask_BS > 0) & (batch.weight > 0).unsqueeze(1)
        packed = self._packed(mask_BS)
        return {"source": real_BS if packed is None else packed.take(real_BS, False)}

    @torch.no_grad()
    def check_packing(self) -> None:
        """Run two texts alone, in one row, and in one row with another first text.

        Raises:
            BackboneError: the model does not keep them apart.
        """
        ids_BS = torch.arange(8, device=self.device).view(2, 4) % self.codec.vocabulary
        other_BS = torch.stack([ids_BS[0].flip(0), ids_BS[1]])
        positions = {"position_ids": torch.arange(4, device=self.device).repeat(2)[None]}
        try:
            alone = self._states(input_ids=ids_BS)
            first, second = (self._states(input_ids=ids.view(1, -1), **positions) for ids in (ids_BS, other_BS))
        except TypeError as error:
            raise BackboneError(
                f"{_NOT_PACKED} {type(self.model).__name__} reads no position ids{_NO_PACKING}"
            ) from error
        rounding = 1e-3 if self.dtype == torch.float32 else 0.05
        differences = [(first[4:] - second[4:]).norm() / 1e-3, (alone - first).norm() / rounding]
        if not all(float(difference / alone.norm()) < 1 for difference in differences):
            raise BackboneError(
                f"{_NOT_PACKED} {type(self.model).__name__} computes a text in a row of two otherwise than alone"
                f"{_NO_PACKING}"
            )

    def _states(self, **inputs: Tensor) -> Tensor:
        """Return all last hidden states, `[N, D]` in float32, without dropout."""
        with evaluating(self.model), self.precision():
            states: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return states.float().flatten(0, 1)

    def whole_texts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the prompt and answer."""
        ids_BS, mask_BS, _ = join(batch, self.codec.pad_id)
        return ids_BS, mask_BS

    def _encode(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        body = self.model.base_model
        states: Tensor = body(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).last_hidden_state
        return states

    def generation_inputs(self, batch: Batch) -> GenerationInputs:
        """Return the prompt, padded on the left; answers follow it, unless the prompt is given as embeddings."""
        inputs, _ = self.prefixed(batch.source_ids, batch.source_mask)
        padded = pad_left(*inputs.values())
        prompt = 0 if "inputs_embeds" in inputs else batch.source_ids.shape[1]
        special = {"pad_token_id": self.codec.pad_id, "eos_token_id": sorted(self.end_ids)}
        return GenerationInputs({**dict(zip(inputs, padded, strict=True)), **special}, prompt, prompt)


def join(batch: Batch, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows `source + target` without gaps.

    Returns:
        ids, mask and labels, each `[B, S]` with S = longest source + target of the batch; labels are IGNORE
        on the source and on padding.
    """
    real_BT = batch.target_ids != IGNORE
    ids_BS = torch.cat([batch.source_ids, batch.target_ids.masked_fill(~real_BT, pad_id)], dim=1)
    mask_BS = torch.cat([batch.source_mask, real_BT.to(batch.source_mask.dtype)], dim=1)
    labels_BS = torch.cat([torch.full_like(batch.source_ids, IGNORE), batch.target_ids], dim=1)
    order_BS = real_first(mask_BS)
    longest = int(mask_BS.sum(1).max())
    return tuple(tensor.gather(1, order_BS)[:, :longest] for tensor in (ids_BS, mask_BS, labels_BS))  # type: ignore[return-value]


def pad_left(rows: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding of right-padded ids `[B, L]` or embeddings `[B, L, D]` to the left."""
    order_BL = torch.argsort(mask_BL, dim=1, stable=True)  # padding first; the order of real tokens is kept
    index = order_BL if rows.dim() == 2 else order_BL.unsqueeze(-1).expand_as(rows)
    return rows.gather(1, index), mask_BL.gather(1, order_BL)
