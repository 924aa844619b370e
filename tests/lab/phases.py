"""Phases begun and ended as the trainer does it, without training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raycl.bank.tensor_groups import TensorGroups
from raycl.methods.base import Learned, Method, trained_names
from raycl.methods.context import Step, TaskContext
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase import trainer
from raycl.training.phase.data import PhaseData
from raycl.training.phase.routing import PublishedRouter, router_record
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Mixture, Phase


def begin_phase(context: TrainingContext, index: int = 0, resumed: bool = False) -> PhaseData:
    """Begin a phase of the method; modifiers do not."""
    world = DistributedContext.alone(torch.device("cpu"))
    data = PhaseData(context, context.phases[index], world, resumed)
    trainer.begin_phase(data)
    return data


def end_phase(context: TrainingContext, task_context: TaskContext) -> Learned | None:
    """End the method's phase with its present parameters; the schedule decides what is published."""
    own = dict(context.backbone.named_parameters())
    task_context.parameters = {name: own[name].detach().clone() for name in trained_names(context.backbone)}
    learned = context.method.end_task(task_context)
    return learned and context.schedule.published(task_context.phase, context.method, learned)


def routed(method: Method, learned: Learned | None, batch: Batch, task: str | None = None) -> Mixture:
    """Return the mixture by the router of what a phase gave, as its evaluation routes."""
    assert learned is not None
    values, tensors = router_record(learned, [task or ""])
    frozen = TensorGroups.of(tensors)
    result = PublishedRouter.of(method, Checkpoint(0, 0, 0, {}, {}, router=values, frozen_state=frozen))
    assert result is not None
    return result.mixture(batch, task)


def bare(phase: Phase, parameters: dict[str, Tensor] | None = None, step: Step | None = None) -> TaskContext:
    """Return a context without a stream, for methods that read no rows."""
    nothing: Any = None
    return TaskContext(phase, 4, nothing, nothing, step=step or Step(), parameters=parameters or {})
