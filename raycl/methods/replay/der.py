"""DER++: stored rows are trained on again, and the model's outputs on them are held to those that were stored.

    L(new rows) + alpha MSE(outputs now, outputs stored) + beta L(stored rows)

Each L is a mean over its own loss positions; MSE is the mean over the loss positions of the stored rows of a step, and
at each position over its stored outputs. Buzzega et al. 2020, "Dark Experience for General Continual Learning: a
Strong, Simple Baseline", eq. 6; code: mammoth, `models/derpp.py`. ContinualLM (Ke et al.) has it for continual
pre-training.
Outputs are logits, as in the paper: the scores of all labels known then, or the `outputs` largest logits at each token
of the answer (or hidden word), since those of a whole vocabulary would take more room than the model.
Where it differs from the sources:
- A share of each task's rows is stored, with their outputs at the task's end (ContinualLM's moment too). The paper
  fills a buffer by reservoir sampling with the outputs at the time when a row was seen.
- Both terms are of the same rows: each new row brings one of them along, every stored row equally often in
  an epoch. mammoth draws one batch for each term; ContinualLM one for both, in every n-th step.
- ContinualLM stores all last hidden states, whose size grows with the width and the length of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.backbone.base import loss_count
from raycl.bank.tensor_groups import TensorGroups
from raycl.methods.base import Learned, State, activate_batch, under
from raycl.methods.context import Step, TaskContext
from raycl.methods.replay.stored_rows import StoredRows, dealt, joined, numbers_of
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Batch, Phase, Task

AT_ONCE = 16
"""Rows that are computed together."""


@dataclass(frozen=True)
class StoredOutputs:
    """Outputs of n rows with P loss positions in all, of k columns each; on the CPU.

    Of a label head the scores of all labels known then; of a vocabulary the `k` largest logits of each position with
    their columns, so that a position takes 8 k bytes and not 4 bytes for each word (DER++ stores all of an image
    model's logits, which are few).

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
        return {"values": self.values, "columns": self.columns, "counts": self.counts}

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> StoredOutputs:
        """Restore from what `tensors` gave."""
        return StoredOutputs(tensors["values"], tensors["columns"], tensors["counts"])

    @staticmethod
    def read(output: Output, examples: int, k: int) -> StoredOutputs:
        """Return the `k` largest of each position of a forward pass over so many examples."""
        at = output.positions()
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


KEPT = "outputs"
"""Kind of tensors of stored outputs in checkpoints."""


class DerConfig(WrapperConfig):
    """Any learner, with stored rows added to each batch and stored outputs that the model is held to."""

    name: Literal["der++"] = "der++"
    share: float = Field(
        0.02, gt=0, le=1, description="share of each task's train rows that is stored with its outputs; at least one"
    )
    alpha: float = Field(0.1, ge=0, description="weight of the mean squared difference to stored outputs")
    beta: float = Field(0.5, ge=0, description="weight of the task loss on stored rows")
    outputs: int = Field(
        32, ge=1, description="largest logits that are stored of each token of an answer; of label heads all are"
    )

    kept_share = "share"
    unused_in_first_phase = ("alpha", "beta")
    rereads_rows: ClassVar[bool] = True

    def unused_with(self, has_label_head: bool, reason: str) -> Iterator[tuple[str, str]]:
        """Label heads have few outputs."""
        yield from super().unused_with(has_label_head, reason)
        if has_label_head:
            yield "outputs", reason


class Der(Wrapper):
    """Any learner that trains one model for all labels, with stored rows and outputs.

    Attributes:
        outputs: task -> the model's outputs for its stored rows.
    """

    Config = DerConfig
    needs_shared = "adapters"

    def __init__(self, config: DerConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.outputs: dict[str, StoredOutputs] = {}
        self._context: TaskContext | None = None
        self._rows: StoredRows | None = None
        self._stored: StoredOutputs | None = None
        self._counts = _StepCounts()

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Open the stored rows of all earlier tasks, with their outputs."""
        self.learner.begin_task(phase, context)
        self._context = context
        self._rows = self._opened(context.earlier_tasks, context)
        earlier = [self.outputs[task.name] for task in context.earlier_tasks if self._rows]
        self._stored = StoredOutputs.below(earlier) if self._rows else None
        assert not self._rows or len(self._rows) == len(self._stored or ()), "each stored row has outputs"

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the rows of the batch, then the stored rows that they bring along."""
        batch, context = self.learner.prepare_batch(batch), self._context
        if not self._rows or context is None:
            return batch
        epoch = context.step.index // -(-context.count("train") // context.batch_size)
        numbers = dealt(batch, len(self._rows), self.seed + 1000 * context.phase.index + epoch)
        replayed, mixed = 0, batch
        if numbers:
            stored = self._rows.batch(numbers)
            replayed, mixed = loss_count(stored), joined(batch, stored, self.backbone.codec.pad_id)
        self._counts.add(context.step, loss_count(batch), replayed)
        return mixed

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return what makes the step's mean loss over all rows the loss of DER++, in addition to the learner's own."""
        own = self.learner.penalty(batch, output)
        places, numbers = numbers_of(batch)
        if not self._rows or self._stored is None or self._context is None:
            return own
        new, replayed = self._counts.sums(self._context, self.backbone)
        count = loss_count(batch)
        if not count or not replayed:
            return own
        at = output.positions()
        at = at[torch.isin(output.rows[at], places)]
        values, columns = self._stored.select(numbers.cpu())
        device = output.logits.device
        distance = squared_error(output.logits[at], values.to(device), columns.to(device))
        loss, again = output.loss_sum, output.losses()[at].sum()
        total = new + replayed  # a step's objective is (loss_sum + penalty * count) / total, summed over micro-batches
        change = (loss - again) * (total / max(new, 1.0) - 1) + again * (self.config.beta * total / replayed - 1)
        change_of_loss: Tensor = (change + self.config.alpha * distance * (total / replayed)) / count
        return change_of_loss if own is None else change_of_loss + own

    def end_task(self, context: TaskContext) -> Learned | None:
        """Return the learner's; the outputs of the task's stored rows are kept."""
        learned = self.learner.end_task(context)
        for task in context.phase.tasks:
            self.outputs[task.name] = self._outputs(self._opened([task], context))
        return learned

    def _opened(self, tasks: Sequence[Task], context: TaskContext) -> StoredRows:
        entries = [(task, context.stored_rows(task, self.config.share)) for task in tasks]
        return StoredRows(entries, context, self.backbone, self.seed)

    @torch.no_grad()
    def _outputs(self, rows: StoredRows) -> StoredOutputs:
        """Return the outputs of all rows by the present model, without dropout."""
        outputs = []
        for batch in rows.batches(AT_ONCE, self.backbone):
            with activate_batch(self.learner, batch):
                output = self.backbone(batch)
            width = output.logits.shape[1] if self.backbone.head is not None else self.config.outputs
            outputs.append(StoredOutputs.read(output, len(batch), width))
        return StoredOutputs.below(outputs)

    def state_dict(self) -> State:
        values, tensors = self.learner.state_dict()
        held = TensorGroups({f"{KEPT}/{task}/": kept.tensors() for task, kept in self.outputs.items()})
        return {**values, KEPT: list(self.outputs)}, tensors | held

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.outputs = {task: StoredOutputs.of(under(f"{KEPT}/{task}/", tensors)) for task in values.get(KEPT, ())}
        self.learner.load_state_dict(values, tensors)


class _StepCounts:
    """Loss positions of new and of stored rows in an optimizer step, over all workers.

    All micro-batches of a step are prepared before the first one is computed.
    """

    def __init__(self) -> None:
        self._step: Step | None = None
        self._mine = [0, 0]
        self._sums: tuple[float, float] | None = None

    def add(self, step: Step, new: int, replayed: int) -> None:
        """Add the sums of a micro-batch of this worker."""
        if self._step is not step:
            self._step, self._mine, self._sums = step, [0, 0], None
        self._mine = [self._mine[0] + new, self._mine[1] + replayed]

    def sums(self, context: TaskContext, backbone: Backbone) -> tuple[float, float]:
        """Return the sums over all workers. Collective at the first call in a step."""
        if self._sums is None:
            total = context.sum(torch.tensor(self._mine, dtype=torch.float64, device=backbone.device))
            self._sums = (float(total[0]), float(total[1]))
        return self._sums
