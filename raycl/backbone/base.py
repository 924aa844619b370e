"""The face of a backbone: a loss over a batch, answers for a batch, and which linears it has.

What it does not know: how the model was loaded, and which of its parameters a method trains.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raycl.backbone.codec import HFCodec
from raycl.backbone.head import LabelHead
from raycl.types import IGNORE, Batch


@dataclass
class Output:
    """What one forward pass gives.

    Attributes:
        loss_sum: scalar float32, cross-entropy **summed** over the batch's loss positions (see `loss_count`).
        logits: `[B, C]` (encoder-only) or `[B, T, V]`, as the model computed them.
    """

    loss_sum: Tensor
    logits: Tensor


def loss_count(batch: Batch) -> int:
    """Number of positions that carry loss: target tokens, or examples for encoder-only backbones."""
    labels = batch.target_ids if batch.target_ids.shape[1] else batch.label_ids
    return int((labels != IGNORE).sum())


class Backbone(nn.Module, ABC):
    """A language model of one of three kinds.

    Attributes:
        model: the Hugging Face model.
        codec: text to ids and back.
        head: label head of encoder-only backbones, else None.
        dtype: what the model computes in, whatever an engine keeps trained parameters in.
    """

    head: LabelHead | None

    def __init__(self, model: nn.Module, codec: HFCodec) -> None:
        super().__init__()
        self.model: Any = model
        self.codec = codec
        self.head = None
        self.dtype: torch.dtype = next(model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def precision(self) -> AbstractContextManager[object]:
        """Autocast for bfloat16 models, since an engine may keep trained parameters in float32."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @abstractmethod
    def forward(self, batch: Batch) -> Output:
        """Teacher-forced pass over `batch`; only examples with weight 1 carry loss."""

    @abstractmethod
    def predict(self, batch: Batch, max_new_tokens: int) -> list[str]:
        """One answer text per example, greedy, without any task id.

        Args:
            max_new_tokens: limit of a generated answer; unused by encoder-only backbones.
        """

    def learn_labels(self, labels: Sequence[str]) -> None:
        """Make sure the label head has a row for each of `labels`; nothing to do where there is no head."""

    def model_files(self) -> dict[str, bytes]:
        """Config and tokenizer as the files of a Hugging Face model folder (weights left out)."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.config.save_pretrained(folder)
            self.codec.tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    def label_ids(self) -> dict[str, int]:
        """Label text -> row of the head; empty where there is no head."""
        return {} if self.head is None else {label: row for row, label in enumerate(self.head.labels)}


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in float32 summed over positions whose label is not IGNORE; logits `[..., V]`, labels `[...]`."""
    return nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORE, reduction="sum"
    )
