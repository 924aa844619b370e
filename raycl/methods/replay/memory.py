"""Examples that are kept with a key, as tensors, and those whose keys are nearest to a text's.

Examples are numbered through all tasks in the order of learning. Keys are of a frozen encoder, so they never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycl.backbone import Backbone
from raycl.data.loader import Collate
from raycl.data.tokens import HeldRows, TokenColumns
from raycl.methods.base import under
from raycl.methods.pseudo_samples.samples import flat, lengths
from raycl.methods.replay.buffer import ReplayBuffer
from raycl.methods.replay.stored_rows import FIRST
from raycl.types import Batch, Task

PARTS = ("source_ids", "source_lengths", "target_ids", "target_lengths", "labels", "keys")


class KeyedRows(HeldRows):
    """Examples of one task.

    Attributes:
        tensors: `PARTS`: ids of all examples one after another and the length of each (int32), `[n]` index in the
            task's labels (-1: none), `[n, c]` keys (float32).
    """

    def __init__(self, task: Task, tensors: Mapping[str, Tensor]) -> None:
        sources, targets = (
            [ids.numpy() for ids in torch.split(tensors[f"{name}_ids"], tensors[f"{name}_lengths"].tolist())]
            for name in ("source", "target")
        )
        super().__init__(task, sources, targets, tensors["labels"].tolist())
        self.tensors = tensors

    @staticmethod
    def of(task: Task, columns: TokenColumns, keys: Tensor) -> KeyedRows:
        """Return a memory of rows of a table and their keys."""
        sources, targets = columns.source_ids, columns.target_ids
        result = (flat(sources), lengths(sources), flat(targets), lengths(targets))
        labels = torch.from_numpy(columns.labels.astype(np.int32))
        return KeyedRows(task, dict(zip(PARTS, (*result, labels, keys.float().clone()), strict=True)))


class ExampleMemory(ReplayBuffer[KeyedRows]):
    """Examples of all tasks so far."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: tuple[tuple[int, ...], Collate, Tensor, Tensor] | None = None

    @property
    def count(self) -> int:
        """The number of examples of all tasks."""
        return sum(len(rows) for _, rows in self)

    def batch(self, numbers: Sequence[int], backbone: Backbone, texts: bool = False) -> Batch:
        """Return the examples of these numbers; their positions are `-2 - number`.

        Args:
            texts: add empty texts, for methods that read texts; no texts are kept.
        """
        collate, _, _ = self._open(backbone)
        batch = collate(np.array(numbers, dtype=np.int64), len(numbers))
        blank = ("",) * len(batch) if texts else ()
        return replace(batch, rows=FIRST - batch.rows, texts=blank, tasks=blank)

    def nearest(self, key_C: Tensor, count: int, backbone: Backbone) -> list[int]:
        """Return numbers of the examples with the least Euclidean distance between keys, the nearest first.

        `|k|^2 - 2 k.q` orders keys k as their distance to q does, without a difference of all keys. It is rounded at
        the size of the keys, not of their distance: twice as many are found by it, and these are compared directly.
        """
        _, keys_NC, squares_N = self._open(backbone)
        order_N = squares_N - 2 * (keys_NC @ key_C)
        near_M = order_N.topk(min(2 * count, len(order_N)), largest=False).indices.sort().values
        distance_M = (keys_NC[near_M] - key_C).square().sum(1)
        numbers: list[int] = near_M[distance_M.argsort(stable=True)[:count]].tolist()
        return numbers

    def _open(self, backbone: Backbone) -> tuple[Collate, Tensor, Tensor]:
        """Return what batches are made with, the keys of all examples and their squared norms.

        Opened anew where tasks or labels came.
        """
        state = (*map(len, self.entries.values()), len(backbone.label_ids()))
        if self._opened is None or self._opened[0] != state:
            labels = backbone.label_ids() if backbone.codec.needs_labels else None
            collate = Collate(list(self.entries.values()), backbone.codec.pad_id, labels)
            keys_NC = torch.cat([rows.tensors["keys"] for _, rows in self])
            self._opened = (state, collate, keys_NC, torch.linalg.vector_norm(keys_NC, dim=1).square())
        return self._opened[1:]

    def tensors(self) -> dict[str, Tensor]:
        """Return `memory/<task>/<part>`."""
        return {f"memory/{task}/{part}": rows.tensors[part] for task, rows in self for part in PARTS}

    def values(self) -> list[Any]:
        """Return the task and its labels, in the order of learning."""
        return [[task, rows.task.labels and list(rows.task.labels)] for task, rows in self]

    def take(self, values: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore from what `values` and `tensors` gave."""
        self._opened, self.entries = None, {}
        for name, labels in values:
            held = under(f"memory/{name}/", tensors)
            task = Task(name, None if labels is None else tuple(labels), "")
            self.add(name, KeyedRows(task, {part: held[part] for part in PARTS}))
