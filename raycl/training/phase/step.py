"""One optimizer step: the only place that calls backward and step."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from raycl.backbone.base import loss_count, seed_all
from raycl.errors import DivergedError
from raycl.methods.base import Method, activate_batch
from raycl.methods.modifier import Modifiers
from raycl.training.engines.engine import NONE, Engine
from raycl.training.records.progress import StepResult
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

NOTE = "in a micro-batch of the rows "
"""Begins what an exception is noted to be of."""


def train_step(
    engine: Engine,
    method: Method,
    batches: Sequence[Batch],
    world: DistributedContext,
    seed: int,
    modifiers: Modifiers = NONE,
    before_update: Callable[[], None] | None = None,
) -> StepResult:
    """Accumulate over this worker's micro-batches, then update.

    Args:
        seed: fixes dropout for this step, so that nothing random needs to be kept in a checkpoint.
        modifiers: change the step's gradient before it is clipped; they have begun the task.
        before_update: called once the last backward pass is over; until then nothing that is trained changes.

    Raises:
        DivergedError: the loss or the gradient is not finite.
    """
    seed_all(seed + world.rank, world.device)
    modifiers.begin_step(seed, len(batches), world.sum)
    batches = [method.prepare_batch(batch) for batch in batches]
    counted = loss_count if method.objective is None else method.objective.count
    count, tokens = world.total(sum(map(counted, batches)), sum(map(token_count, batches)))
    batches = [batch.to(world.device) for batch in batches]  # counted before: a GPU would be waited for
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    for batch in batches:
        loss_sum += _accumulate(engine, method, batch, max(count, 1.0), modifiers)
    rate = engine.learning_rate
    if before_update is not None:
        before_update()
    transform = method.transform_gradients if method.transforms_gradients else None
    norm = engine.step(modifiers, transform, method.constraint)
    loss = float(world.sum(loss_sum)) / max(count, 1.0)  # read last, for the same reason
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise DivergedError(
            f"the loss is {loss} and the gradient norm {norm}: lower train.learning_rate (now {rate:g})"
        )
    return StepResult(loss, norm, rate, int(tokens))


def _accumulate(engine: Engine, method: Method, batch: Batch, total: float, modifiers: Modifiers) -> torch.Tensor:
    """Forward and backward of one micro-batch, of which no tensor outlives the call but the summed loss."""
    with ExitStack() as stack:
        stack.push(partial(_note_rows, batch))
        stack.enter_context(activate_batch(method, batch))  # until backward has ended: recomputation reads it again
        output = modifiers.observe_forward(engine.forward, batch)
        penalty = method.penalty(batch, output)
        own = method.objective
        loss, count = (output.loss_sum, loss_count(batch)) if own is None else (own(batch, output), own.count(batch))
        engine.backward(loss if penalty is None else loss + penalty * count, total)
    return loss.detach()


def _note_rows(batch: Batch, kind: object, error: BaseException | None, trace: object) -> None:
    if error is not None:
        error.add_note(f"{NOTE}{' '.join(map(str, batch.rows[batch.rows >= 0].tolist()))}")


def noted_rows(error: BaseException) -> list[int]:
    """Return the rows (`Batch.rows`) of the micro-batch in which an exception was raised; [] if in none."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(NOTE)]
    return [int(row) for note in notes[:1] for row in note.removeprefix(NOTE).split()]


def token_count(batch: Batch) -> int:
    """Count the real tokens of a batch: source plus answer, fill-ups left out."""
    real = batch.weight > 0
    return int(batch.source_mask[real].sum()) + int((batch.target_ids[real] >= 0).sum())
