"""A model's outputs at the loss positions of stored rows, and the distance of the present model's outputs to them.

Of a label head the scores of all labels known then; of a vocabulary the `k` largest logits of each position with their
columns, so that a position takes 8 k bytes and not 4 bytes for each word (DER++ stores all of an image model's logits,
which are few).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raycl.backbone import Output
from raycl.types import IGNORE

AT_ONCE = 16
"""Rows that are computed together."""


@dataclass(frozen=True)
class StoredOutputs:
    """Outputs of n rows with P loss positions in all, of k columns each; on the CPU.

    Attributes:
        values: `[P, k]` float32. columns: `[P, k]` int32, labels of the head or words.
        counts: `[n]` int32, loss positions of each row.
    """

    values: Tensor
    columns: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {"values": self.values, "columns": self.columns, "counts": self.counts}

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> StoredOutputs:
        """Restore from what `tensors` gave."""
        return StoredOutputs(tensors["values"], tensors["columns"], tensors["counts"])

    @staticmethod
    def read(output: Output, examples: int, k: int) -> StoredOutputs:
        """Return the `k` largest of each position of a forward pass over so many examples."""
        at = positions(output)
        logits_PC = output.logits[at].float()
        values, columns = logits_PC.topk(min(k, logits_PC.shape[1]), dim=1)
        counts = torch.bincount(output.rows[at], minlength=examples)
        return StoredOutputs(values.cpu(), columns.to(torch.int32).cpu(), counts.to(torch.int32).cpu())

    @staticmethod
    def below(parts: Sequence[StoredOutputs]) -> StoredOutputs:
        """Return the rows of several; those of fewer columns are filled up with columns that do not count."""
        widest = max((part.values.shape[1] for part in parts), default=0)
        values = [_filled(part.values, widest, -torch.inf) for part in parts]
        columns = [_filled(part.columns, widest, 0) for part in parts]
        return StoredOutputs(torch.cat(values), torch.cat(columns), torch.cat([part.counts for part in parts]))

    def select(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and columns `[Q, k]` of all positions of these rows, row by row."""
        ends = self.counts.long().cumsum(0)
        spans = [range(int(ends[n] - self.counts[n]), int(ends[n])) for n in numbers.tolist()]
        places = torch.tensor([position for span in spans for position in span], dtype=torch.int64)
        return self.values[places], self.columns[places].long()


def positions(output: Output) -> Tensor:
    """Return `[P]`: the positions with loss, example by example, in the order of the text."""
    at = (output.labels != IGNORE).nonzero().squeeze(1)
    return at[torch.argsort(output.rows[at], stable=True)]


def squared_error(logits_QC: Tensor, values_QK: Tensor, columns_QK: Tensor) -> Tensor:
    """Return the sum over positions of the mean squared difference to stored values; -inf (an unknown label) does not
    count.

    Args:
        logits_QC: logits of the present model.
    """
    now_QK = logits_QC.float().gather(1, columns_QK)
    counts_QK = torch.isfinite(values_QK) & torch.isfinite(now_QK)
    error_QK = torch.where(counts_QK, now_QK - values_QK, 0.0).square()
    return (error_QK.sum(1) / counts_QK.sum(1).clamp(min=1)).sum()


def _filled(values_PK: Tensor, width: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(values_PK, (0, width - values_PK.shape[1]), value=fill)
