"""Bytes that workers exchange in an optimizer step.

For the sum of a tensor of S bytes that all N workers get, each sends 2 (N - 1) / N S in a ring, and half of that where
each gets a part of the sum, or where parts are gathered.
What it does not know: how long that takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from raycl.run.plan.workload import MASTER, Engine, Model, Step


@dataclass(frozen=True)
class Traffic:
    """One worker's bytes of an optimizer step.

    Attributes:
        gradients: given to the sum over workers (the torch engine's one flat tensor). parameters: of weights that are
            gathered, over all passes. sent: by each worker, of both.
    """

    gradients: float
    parameters: float
    sent: float


def traffic(model: Model, step: Step, engine: Engine) -> Traffic:
    """Nothing for one worker. Gradients are those of what is trained alone: never of a frozen backbone."""
    workers = engine.workers
    if workers == 1:
        return Traffic(0.0, 0.0, 0.0)
    half = (workers - 1) / workers
    gradients = float(engine.gradient_bytes * model.most_trained)
    sums = step.accumulation if engine.gradients > 1 else 1  # divided gradients are summed after every micro-batch
    if engine.weights > 1:
        passes = (2 + step.recompute) * step.accumulation
        held = model.compute_bytes if engine.separate_masters else MASTER
        trained_base = model.parameters - model.frozen
        adapters = model.most_trained - trained_base
        gathered = model.frozen * model.weight_bytes + trained_base * model.compute_bytes + adapters * held
        return Traffic(gradients * sums, gathered * passes, half * (gradients * sums + gathered * passes))
    if engine.optimizer > 1:
        updated = float(model.compute_bytes * model.most_trained)
        return Traffic(gradients * sums, updated, half * (gradients * sums + updated))
    return Traffic(gradients, 0.0, 2 * half * gradients)
