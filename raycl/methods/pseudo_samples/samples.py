"""Pseudo-samples: inputs that represent a task after it was learned (SAPT, section 4.3).

They are kept as token ids. Inputs only, as SAPT's reflection needs no answers; answers are kept if they are trained on
again (`replay`, and SAPT's ablation +Replay).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raycl.data.tokens import TokenTable, drawn_rows
from raycl.methods.base import under
from raycl.methods.context import TaskContext

Ids = Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True)
class PseudoSamples:
    """Samples of one phase.

    Attributes:
        sources: prompt ids of each, with the model's special tokens; of inputs alone, where a router reads these and
            the samples are not trained on.
        targets: answer ids of each, or empty lists; empty where answers are not kept.
        labels: row of the phase's labels of each, -1 for none; empty where answers are not kept.
        fallback_samples: number of them that are training inputs because the generator produced none.
    """

    sources: list[list[int]]
    targets: list[list[int]]
    labels: list[int]
    fallback_samples: int = 0

    def __len__(self) -> int:
        return len(self.sources)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for checkpoints and the bank: flat int32 ids and the length of each."""
        tensors = {"source_ids": flat(self.sources), "source_lengths": lengths(self.sources)}
        if self.labels:
            tensors |= {"target_ids": flat(self.targets), "target_lengths": lengths(self.targets)}
            tensors["labels"] = torch.tensor(self.labels, dtype=torch.int32)
        if self.fallback_samples:
            tensors["fallback_samples"] = torch.tensor([self.fallback_samples], dtype=torch.int32)
        return tensors

    @staticmethod
    def are_in(tensors: Mapping[str, Tensor]) -> bool:
        """Return whether these are what `tensors` gives; samples may have been removed from a bank on purpose."""
        return {"source_ids", "source_lengths"} <= tensors.keys()

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> PseudoSamples:
        """Restore from what `tensors` gave."""
        sources = _split(tensors["source_ids"], tensors["source_lengths"])
        fallback_samples = int(tensors["fallback_samples"]) if "fallback_samples" in tensors else 0
        if "labels" not in tensors:
            return PseudoSamples(sources, [], [], fallback_samples)
        targets = _split(tensors["target_ids"], tensors["target_lengths"])
        return PseudoSamples(sources, targets, tensors["labels"].tolist(), fallback_samples)


def kept_tensors(kind: str, samples: Mapping[str, PseudoSamples]) -> dict[str, Tensor]:
    """Return samples by task as tensors of a checkpoint: `<kind>/<task>/<name>`."""
    return {f"{kind}/{task}/{name}": value for task, held in samples.items() for name, value in held.tensors().items()}


def kept_samples(kind: str, tasks: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, PseudoSamples]:
    """Invert `kept_tensors`; samples that were removed from a bank on purpose are left out."""
    held = {task: under(f"{kind}/{task}/", tensors) for task in tasks}
    return {task: PseudoSamples.of(kept) for task, kept in held.items() if PseudoSamples.are_in(kept)}


def same_everywhere(value: T, device: torch.device) -> T:
    """Return the first worker's value on all workers: texts sampled on several GPUs, or files of several nodes, may
    differ.

    Args:
        device: device of this worker.
    """
    if not dist.is_available() or not dist.is_initialized():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, device=device)
    shared: T = box[0]
    return shared


def counts_of(kept: Mapping[str, PseudoSamples]) -> dict[str, dict[str, int]]:
    """Return the number of samples of each task, for the summary; also of fallback samples, if a generator failed."""
    counts = {"pseudo": {task: len(samples) for task, samples in kept.items()}}
    fallback_samples = {task: samples.fallback_samples for task, samples in kept.items() if samples.fallback_samples}
    return counts | ({"fallback_samples": fallback_samples} if fallback_samples else {})


@dataclass(frozen=True)
class Volume:
    """The number of samples kept of a task.

    Attributes:
        fraction: fraction of its training rows. limit: most samples; None: no limit.
    """

    fraction: float
    limit: int | None = None

    def of(self, rows: int) -> int:
        """Return the number for so many rows: `max(1, floor(fraction rows))`, as in the files of SAPT's release, within
        the limit."""
        count = min(rows, max(1, int(Decimal(str(self.fraction)) * rows)))
        return count if self.limit is None else min(count, self.limit)


def take_real(context: TaskContext, volume: Volume, seed: int, answers: bool = False) -> PseudoSamples:
    """Return a few training rows of each of the phase's tasks, drawn by `seed`."""
    draw = torch.Generator().manual_seed(seed)
    all_labels = [label for task in context.phase.tasks for label in task.labels or ()]
    numbers = {label: number for number, label in enumerate(dict.fromkeys(all_labels))}
    samples = PseudoSamples([], [], [])
    for table in context.tables("train"):
        rows = drawn_rows(table, volume.of(len(table)), draw)
        if not answers:
            samples.sources.extend(context.router_texts.ids(table, rows))
        else:
            columns = table.columns(rows)
            samples.sources.extend(ids.tolist() for ids in columns.source_ids)
            samples.targets.extend(ids.tolist() for ids in columns.target_ids)
            samples.labels.extend(_label(table, code, numbers) for code in columns.labels.tolist())
    return samples


def _label(table: TokenTable, code: int, numbers: Mapping[str, int]) -> int:
    return -1 if code < 0 or table.task.labels is None else numbers[table.task.labels[code]]


def flat(rows: Sequence[Ids | NDArray[np.int32]]) -> Tensor:
    """Return the ids of all rows one after another, int32."""
    ids = torch.zeros(sum(map(len, rows)), dtype=torch.int32)
    ids.numpy()[:] = np.concatenate([np.zeros(0, dtype=np.int32), *rows])
    return ids


def lengths(rows: Sequence[Ids | NDArray[np.int32]]) -> Tensor:
    """Return the number of ids of each row, int32."""
    return torch.tensor([len(row) for row in rows], dtype=torch.int32)


def _split(ids: Tensor, counts: Tensor) -> list[list[int]]:
    return [part.tolist() for part in torch.split(ids, counts.tolist())]
