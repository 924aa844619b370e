"""Encoder-only backbones (BERT, RoBERTa, MiniLM): pooled states into a growing label head, or hidden words guessed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raycl.backbone.base import Backbone, Guesses, Head, Output, mean_pooled, summed_at, summed_cross_entropy
from raycl.backbone.codec import HFCodec
from raycl.backbone.positions import loss_positions
from raycl.types import IGNORE, Batch

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutput


class NamedRows(nn.Module):
    """The rows of a label head, which grow with the labels seen.

    Attributes:
        labels: row order, by first appearance. weight: `[C, D]`. bias: `[C]`.
    """

    labels: list[str]
    weight: nn.Parameter
    bias: nn.Parameter

    def grow(self, labels: Sequence[str]) -> None:
        """Append a zero row for each label not yet known; old rows keep their values bit for bit."""
        new = [label for label in dict.fromkeys(labels) if label not in self.labels]
        if new:
            self.weight, self.bias = grown(self.weight, len(new)), grown(self.bias, len(new))
            self.labels.extend(new)

    def clear(self) -> None:
        """Forget every label (a new model begins)."""
        self.labels = []
        self.weight, self.bias = grown(self.weight, 0, kept=0), grown(self.bias, 0, kept=0)


class LabelHead(NamedRows):
    """Linear head with named rows.

    Attributes:
        labels: row order, by first appearance.
        weight: `[C, D]`. bias: `[C]`. New rows start at zero, so a new label changes no old logit.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.labels: list[str] = []
        self.weight = nn.Parameter(torch.zeros(0, width))
        self.bias = nn.Parameter(torch.zeros(0))

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """Return logits `[B, C]` over all labels seen so far."""
        return nn.functional.linear(pooled_BD, self.weight, self.bias)


def grown(rows: nn.Parameter, more: int, kept: int | None = None) -> nn.Parameter:
    """Return a parameter of the first `kept` of these rows (None: of all) and so many zero rows."""
    old = rows.detach()[:kept]
    return nn.Parameter(torch.cat([old, old.new_zeros(more, *old.shape[1:])]), requires_grad=rows.requires_grad)


class LanguageHead(nn.Module):
    """Maps states to scores over the vocabulary.

    Attributes:
        architecture: class of the full model. prefix: name of the encoder in it.
        is_fresh: the checkpoint has no such head, so some of its weights are random (the output words are always those
            of the input embeddings where the architecture ties them).
    """

    def __init__(self, full_model: Any, model: Any, is_fresh: bool) -> None:
        """Take the head from `full_model`; `model` is the encoder that it will read."""
        super().__init__()
        self.architecture: str = type(full_model).__name__
        self.prefix: str = str(full_model.base_model_prefix)
        self.is_fresh = is_fresh
        if getattr(full_model.config, "tie_word_embeddings", True):
            full_model.get_output_embeddings().weight = model.get_input_embeddings().weight
        setattr(full_model, self.prefix, _Given())
        self.whole = full_model

    def forward(self, states_MD: Tensor) -> Tensor:
        """Map `[M, D]` to `[M, V]`."""
        logits: Tensor = self.whole(inputs_embeds=states_MD[None]).logits
        return logits[0]

    def exported(self, name: str) -> str:
        """Return the name in the full model's checkpoint of a parameter of encoder (`model.`) or head (`language.`)."""
        if name.startswith("model."):
            return f"{self.prefix}.{name.removeprefix('model.')}"
        return name.removeprefix("language.whole.")


class _Given(nn.Module):
    """Replaces the encoder: its inputs are already the states."""

    def forward(self, *nothing: Any, inputs_embeds: Tensor, **others: Any) -> BaseModelOutput:
        """Return `[1, M, D]` unchanged."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)


class EncoderBackbone(Backbone):
    """A backbone with mean or first-token pooling of the last hidden states and a `LabelHead`.

    Attributes:
        language: where texts themselves are learned, the head that guesses hidden words; `forward` then does that.
    """

    def __init__(self, model: nn.Module, codec: HFCodec, pooling: str, language: LanguageHead | None = None) -> None:
        super().__init__(model, codec)
        self.pooling = pooling
        self.head: Head = LabelHead(self.model.config.hidden_size)
        self.language = language
        self.has_untrained_language_head: bool = language is not None and language.is_fresh

    def learn_labels(self, labels: Sequence[str]) -> None:
        """Add head rows for labels not seen before."""
        self.head.grow(labels)

    def states(self, batch: Batch) -> Tensor:
        """Return the last hidden states `[B, L, D]` of the text."""
        inputs, prefix = self.prefixed(batch.source_ids, batch.source_mask)
        if "inputs_embeds" in inputs:
            inputs["position_ids"] = self._positions(inputs["attention_mask"])
        states: Tensor = self.model(**inputs).last_hidden_state[:, prefix : prefix + batch.source_ids.shape[1]]
        return states

    def pooled(self, batch: Batch) -> Tensor:
        """Return sentence states `[B, D]` without padding."""
        states_BLD = self.states(batch)
        if self.pooling == "cls":
            first: Tensor = states_BLD[:, 0]
            return first
        return mean_pooled(states_BLD, batch.source_mask)

    def _positions(self, mask_BS: Tensor) -> Tensor:
        """Count real positions, so that a masked prefix shifts nothing; RoBERTa starts behind its padding id."""
        embeddings = getattr(self.model, "embeddings", None)
        first = 0
        if hasattr(embeddings, "create_position_ids_from_input_ids"):
            first = int(embeddings.padding_idx) + 1  # type: ignore[union-attr]
        return (mask_BS.cumsum(1) - 1).clamp(min=0) + first

    def forward(self, batch: Batch) -> Output:
        """Compute the cross-entropy over all labels seen so far (see `competing_labels`), or over masked words."""
        if self.language is not None:
            return super().forward(batch)
        with self.precision():
            logits_BC = self.head(self.pooled(batch))
        label_B, rows_B = batch.label_ids, torch.arange(len(batch), device=logits_BC.device)
        competing_BC = None
        if self.training and self.competing_labels:
            competes = [label in self.competing_labels for label in self.head.labels]
            competes_C = torch.tensor(competes, dtype=torch.bool, device=logits_BC.device)
            alone_B1 = competes_C[label_B.clamp(min=0)].unsqueeze(1)  # not of replayed examples
            competing_BC = logits_BC.masked_fill(alone_B1 & ~competes_C, -torch.inf)
        loss = summed_cross_entropy(logits_BC if competing_BC is None else competing_BC, label_B)
        return Output(loss, logits_BC, label_B, rows_B, competing_BC)

    def true_logits(self, batch: Batch) -> Tensor:
        """Return the true logits of the label head, or of masked words."""
        if self.language is not None:
            return super().true_logits(batch)
        with self.precision():
            logits_BC = self.head(self.pooled(batch))
        return summed_at(logits_BC, batch.label_ids)

    def guesses(self, batch: Batch) -> Guesses:
        """Return every hidden word; in batches without any, one position that carries no loss."""
        assert self.language is not None, "the backbone was loaded without its language head"
        labels_BL = batch.target_ids if batch.target_ids.shape[1] else torch.full_like(batch.source_ids, IGNORE)
        chosen_BL = loss_positions(labels_BL)
        rows, columns = chosen_BL.nonzero(as_tuple=True)
        with self.precision():
            logits_MV = self.language(self.states(batch)[rows, columns])
        return Guesses(logits_MV, labels_BL[rows, columns], rows)

    def whole_texts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the texts with hidden words restored."""
        ids_BL = batch.source_ids
        if self.language is not None and batch.target_ids.shape == ids_BL.shape:
            ids_BL = torch.where(batch.target_ids == IGNORE, ids_BL, batch.target_ids)
        return ids_BL, batch.source_mask

    def exported_name(self, name: str) -> str:
        """Return the full model's name where there is a language head; it loads with and without the head."""
        return super().exported_name(name) if self.language is None else self.language.exported(name)

    def model_files(self) -> dict[str, bytes]:
        """Write the files of every backbone; the config names the class of the weights."""
        if self.language is not None:
            self.model.config.architectures = [self.language.architecture]
        return super().model_files()

    def score_labels(self, batch: Batch) -> tuple[Tensor, list[str]]:
        """Return scores over all labels seen so far; -inf where nothing is known of a label."""
        with self.precision():
            logits_BC = self.head(self.pooled(batch)).float()
        return logits_BC, self.head.labels
