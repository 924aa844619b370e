"""Workers' start of a run from a snapshot of a bank (`bank.start`), and its score before a revision."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from raycl.errors import BankError, RunError, StorageError
from raycl.storage import Storage
from raycl.training.definition.settings import BankConfig
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.evaluation import StreamEvaluation
from raycl.training.phase.routing import PublishedRouter, TextAlone
from raycl.training.records.bank_start import Revision, check_backbone, read_training_state, start_from_snapshot
from raycl.training.records.named_bank import snapshot_at
from raycl.training.records.tensor_objects import SharedReader, TensorObjects
from raycl.training.workers.control import Control
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Score

log = logging.getLogger("raycl")

BEFORE = "before"
"""Folder of the answers of the snapshot that a revision starts from."""


def scores_of(
    start: str,
    context: TrainingContext,
    storage: Storage,
    world: DistributedContext,
    shared: SharedReader | None,
    control: Control,
) -> dict[str, Score]:
    """Return the score of every task of the stream with the snapshot as it is. Collective; the context is used up.

    Where each task has a model of its own, the newest task's model is evaluated, and the run's records have the others'
    scores.

    Raises:
        BankError: the snapshot is of another backbone, or its training state is missing or damaged.
    """
    error = None
    try:
        bank, snapshot = snapshot_at(start)
        if world.is_first:
            check_backbone(snapshot, context)
        done, phases = read_training_state(bank, snapshot, TensorObjects(storage, bank.storage, shared))
    except (BankError, StorageError) as raised:
        error = raised
    world.raise_any(error)
    context.method.load_state_dict(done.method, done.frozen_state)
    context.load_learned(done.parameters)
    if world.is_first:
        log.info("snapshot %d, before the task is learned again:", snapshot.number)
    newest = tuple(task for task in context.stream.tasks if task.name == snapshot.tasks[-1].name)
    last = replace(context.phases[-1], name=BEFORE, tasks=newest)
    router = PublishedRouter.of(context.method, done)
    is_chosen = context.evaluation.instruction == "chosen"
    evaluation = StreamEvaluation(
        context,
        world,
        storage,
        router,
        lambda task: control.progress("evaluating", phase=last.index, phases=len(context.phases), task=task),
        TextAlone.of(context, router, snapshot) if router is not None and is_chosen else None,
    )
    row = evaluation.row(last)
    if context.schedule.one_model_per_task and phases:
        row = {**{name: Score(**cell) for name, cell in phases[-1]["row"].items()}, **row}
    return row


def start_from_bank(
    config: BankConfig,
    context: TrainingContext,
    storage: Storage,
    world: DistributedContext,
    shared: SharedReader | None,
    before: Mapping[str, Score],
) -> None:
    """Begin the run with the snapshot's training state. Collective: errors are raised by all workers.

    Args:
        before: `scores_of` the snapshot, for a run that learns a task again; empty for others.

    Raises:
        BankError: the snapshot is of another backbone, or its training state is missing or damaged.
    """
    error = None
    try:
        if world.is_first:
            bank, snapshot = snapshot_at(str(config.start))
            revision = Revision(config.revise, config.revise_from == "previous", before) if config.revise else None
            start_from_snapshot(bank, snapshot, context, TensorObjects(storage, bank.storage, shared), revision)
    except (BankError, RunError, StorageError) as raised:
        error = raised
    world.raise_any(error)
