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

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.backbone.base import loss_count
from raycl.methods.base import Learned, State, activate_batch, under
from raycl.methods.context import Step, TaskContext
from raycl.methods.replay.buffer import ReplayBuffer, RowBuffer
from raycl.methods.replay.outputs import AT_ONCE, StoredOutputs, positions, squared_error
from raycl.methods.replay.stored_rows import StoredRows, joined, numbers_of
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Batch, Phase

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
        buffer: numbers of stored rows. outputs: the model's outputs for them, by task.
    """

    Config = DerConfig
    needs_shared = "adapters"

    def __init__(self, config: DerConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.buffer = RowBuffer(config.share)
        self.outputs = ReplayBuffer[StoredOutputs]()
        self._context: TaskContext | None = None
        self._rows: StoredRows | None = None
        self._stored: StoredOutputs | None = None
        self._counts = _StepCounts()

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Check that rows of all earlier tasks are in the buffer, with their outputs."""
        self.learner.begin_task(phase, context)
        self._context = context
        self.buffer.fill(context)
        self._rows = StoredRows(
            [(self.buffer.tasks[name], rows) for name, rows in self.buffer], context, self.backbone, self.seed
        )
        self._stored = (
            StoredOutputs.below([self.outputs.entries[name] for name, _ in self.buffer]) if self._rows else None
        )
        assert not self._rows or len(self._rows) == len(self._stored or ()), "each stored row has outputs"

    # ---- a step --------------------------------------------------------------------------------------------------

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the rows of the batch, then the stored rows that they bring along."""
        batch = self.learner.prepare_batch(batch)
        numbers = self._drawn(batch)
        if not self._rows or self._context is None:
            return batch
        replayed = 0
        mixed = batch
        if numbers:
            stored = self._rows.batch(numbers)
            replayed, mixed = loss_count(stored), joined(batch, stored, self.backbone.codec.pad_id)
        self._counts.add(self._context.step, loss_count(batch), replayed)
        return mixed

    def _drawn(self, batch: Batch) -> list[int]:
        """Return numbers of stored rows: an epoch's order of all of them, dealt to the phase's rows."""
        if not self._rows or self._context is None:
            return []
        context = self._context
        epoch = context.step.index // -(-context.count("train") // context.batch_size)
        draw = torch.Generator().manual_seed(self.seed + 1000 * context.phase.index + epoch)
        order = torch.randperm(len(self._rows), generator=draw).tolist()
        return [order[row % len(order)] for row in batch.rows.tolist() if row >= 0]

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
        at = positions(output)
        at = at[torch.isin(output.rows[at], places)]
        values, columns = self._stored.select(numbers.cpu())
        device = output.logits.device
        distance = squared_error(output.logits[at], values.to(device), columns.to(device))
        loss, again = output.loss_sum, output.losses()[at].sum()
        total = new + replayed  # a step's objective is (loss_sum + penalty * count) / total, summed over micro-batches
        change = (loss - again) * (total / max(new, 1.0) - 1) + again * (self.config.beta * total / replayed - 1)
        change_of_loss: Tensor = (change + self.config.alpha * distance * (total / replayed)) / count
        return change_of_loss if own is None else change_of_loss + own

    # ---- the end of a task ---------------------------------------------------------------------------------------

    def end_task(self, context: TaskContext) -> Learned | None:
        """Return the learner's; the outputs of the task's stored rows are kept."""
        learned = self.learner.end_task(context)
        for task in context.phase.tasks:
            stored = [(task, context.stored_rows(task, self.config.share))]
            self.outputs.add(task.name, self._outputs(StoredRows(stored, context, self.backbone, self.seed)))
        return learned

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

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        values, tensors = self.learner.state_dict()
        held = {
            f"{KEPT}/{task}/{name}": tensor for task, kept in self.outputs for name, tensor in kept.tensors().items()
        }
        return {**values, KEPT: list(self.outputs.entries)}, tensors | held

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.outputs.entries = {
            task: StoredOutputs.of(under(f"{KEPT}/{task}/", tensors)) for task in values.get(KEPT, ())
        }
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
