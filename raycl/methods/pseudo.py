"""Pseudo samples: prompts that stand for a task after it was learned (SAPT, section 4.3).

They are kept as token ids, beside the task's adapter. Inputs only, as SAPT's reflection needs no answers; answers are
kept where they are trained on again (the ablation +Replay).
What it does not know: what is done with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch
from torch import Tensor

from raycl.data.tokens import Split, TokenTable
from raycl.errors import DataError
from raycl.methods.stage_rows import StageRows

Ids = Sequence[int]


@dataclass(frozen=True)
class PseudoSamples:
    """Samples of one stage.

    Attributes:
        sources: prompt ids of each, with the model's special tokens.
        targets: answer ids of each, or empty lists; empty where answers are not kept.
        labels: row of the stage's labels of each, -1 for none; empty where answers are not kept.
    """

    sources: list[list[int]]
    targets: list[list[int]]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.sources)

    def tensors(self) -> dict[str, Tensor]:
        """For checkpoints and the bank: flat int32 ids and the length of each."""
        found = {"source_ids": _flat(self.sources), "source_lengths": _lengths(self.sources)}
        if self.labels:
            found |= {"target_ids": _flat(self.targets), "target_lengths": _lengths(self.targets)}
            found["labels"] = torch.tensor(self.labels, dtype=torch.int32)
        return found

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> PseudoSamples:
        """Back from what `tensors` gave."""
        sources = _split(tensors["source_ids"], tensors["source_lengths"])
        if "labels" not in tensors:
            return PseudoSamples(sources, [], [])
        targets = _split(tensors["target_ids"], tensors["target_lengths"])
        return PseudoSamples(sources, targets, tensors["labels"].tolist())


def volume(fraction: float, rows: int) -> int:
    """How many samples stand for so many rows: `max(1, floor(fraction rows))`, as in the files of SAPT's release."""
    return min(rows, max(1, int(Decimal(str(fraction)) * rows)))


def take_real(rows: StageRows, fraction: float, seed: int, answers: bool = False) -> PseudoSamples:
    """A few training rows of each of the stage's tasks, drawn by `seed`."""
    draw = torch.Generator().manual_seed(seed)
    all_labels = [label for task in rows.stage.tasks for label in task.labels or ()]
    place = {label: number for number, label in enumerate(dict.fromkeys(all_labels))}
    found = PseudoSamples([], [], [])
    for table in rows.tables("train"):
        chosen = torch.randperm(len(table), generator=draw)[: volume(fraction, len(table))].sort().values.tolist()
        columns = table.columns(chosen)
        found.sources.extend(ids.tolist() for ids in columns.source_ids)
        if answers:
            found.targets.extend(ids.tolist() for ids in columns.target_ids)
            found.labels.extend(_label(table, code, place) for code in columns.labels.tolist())
    return found


def _label(table: TokenTable, code: int, place: Mapping[str, int]) -> int:
    return -1 if code < 0 or table.task.labels is None else place[table.task.labels[code]]


def read_file(rows: StageRows, folder: str, fraction: float) -> PseudoSamples:
    """From `<task>.jsonl` of each of the stage's tasks, lines of `{"text": ...}`: the first ones, as many as count.

    Raises:
        DataError: a file is missing or empty, or a line has no text.
    """
    sources: list[list[int]] = []
    counts = {table.task.name: len(table) for table in rows.tables("train")}
    for task in rows.stage.tasks:
        texts = read_texts(folder, task.name)
        sources += rows.prompts(task, texts[: volume(fraction, counts.get(task.name, len(texts)))])
    return PseudoSamples(sources, [], [])


def read_texts(folder: str, task: str) -> list[str]:
    """Of `<folder>/<task>.jsonl`.

    Raises:
        DataError: the file is missing, not in UTF-8 or empty, or a line has no text.
    """
    path = Path(folder) / f"{task}.jsonl"
    if not path.is_file():
        raise DataError(
            f"'{path}' with pseudo inputs is missing: expected one JSON line {{\"text\": ...}} for each of them "
            "(method.arm.files), or choose method.arm.source=real"
        )
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' with pseudo inputs is not in UTF-8 ({error}): save it in UTF-8") from error
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"'{path}' line {number} is no pseudo input: expected {{\"text\": ...}}") from error
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"'{path}' line {number} has no text: remove the line, or write an input")
        found.append(text)
    if not found:
        raise DataError(f"'{path}' holds no pseudo input: write at least one line {{\"text\": ...}}")
    return found


def sources_of(rows: StageRows, split: Split) -> list[list[int]]:
    """Prompt ids of all rows of a split of the stage's tasks."""
    return [ids.tolist() for table in rows.tables(split) for ids in table.columns(range(len(table))).source_ids]


def _flat(rows: Sequence[Ids]) -> Tensor:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int32)


def _lengths(rows: Sequence[Ids]) -> Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.int32)


def _split(flat: Tensor, lengths: Tensor) -> list[list[int]]:
    return [part.tolist() for part in torch.split(flat, lengths.tolist())]
