"""A trial: the first steps of a phase, taken to see how well it begins, and undone."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from raycl.backbone.base import loss_count
from raycl.methods.base import activate_batch
from raycl.methods.context import Step
from raycl.training.engines.engine import OpenEngine
from raycl.training.phase.data import PhaseData, stable_seed
from raycl.training.phase.step import train_step

log: logging.Logger = logging.getLogger("raycl")


def trial_losses(
    open_engine: OpenEngine, before_update: Callable[[], None], data: PhaseData, steps: int
) -> Tensor | None:
    """Return the losses of the steps after a trial; see `TaskContext.trial_losses`. Collective.

    Args:
        before_update: see `train_step`.
    """
    began, context, world = time.perf_counter(), data.context, data.world
    method, backbone, phase, loader = context.method, context.backbone, data.phase, data.loader()
    steps = min(steps, loader.order.steps_per_epoch // 2, loader.order.steps // 2)
    if not steps:
        return None
    before = {name: parameter.detach().clone() for name, parameter in data.trained().items()}
    engine = open_engine(loader.accumulation, loader.order.steps, phase.name)
    backbone.train()
    for index in range(steps):
        batches = loader.micro_batches(index)
        seed = stable_seed(context.info.seed, "step", phase.index, index)
        data.step = Step(index, seed, len(batches))
        train_step(engine, method, batches, world, seed, before_update=before_update)
    engine.close()
    data.step = Step()
    backbone.eval()
    sums, own = torch.zeros(2, steps, dtype=torch.float64, device=world.device), method.objective
    for index in range(steps):
        for batch in loader.micro_batches(steps + index):
            batch = batch.to(world.device)
            with torch.no_grad(), activate_batch(method, batch):
                output = backbone(batch)
                sums[0, index] += output.loss_sum if own is None else own(batch, output)
            sums[1, index] += loss_count(batch) if own is None else own.count(batch)
    sums = world.sum(sums).cpu()
    losses = sums[0] / sums[1].clamp(min=1)
    with torch.no_grad():
        for name, parameter in data.trained().items():  # an engine may have replaced the objects
            parameter.copy_(before[name])
    if world.is_first:
        mean, spent = float(losses.mean()), time.perf_counter() - began
        log.info("    a trial of %d steps: loss %.4f on the rows of the next %d (%.1f s)", steps, mean, steps, spent)
    return losses
