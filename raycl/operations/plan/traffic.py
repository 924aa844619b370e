"""Bytes that workers exchange in an optimizer step.

For the sum of a tensor of S bytes that all N workers get, each sends 2 (N - 1) / N S in a ring, and half of that where
each gets a part of the sum, or where parts are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

from raycl.operations.plan.workload import MASTER, EngineLoad, ModelLoad, StepLoad

PASSES = 2
"""For which weights are gathered: forward, and backward with what it recomputes."""


@dataclass(frozen=True)
class Traffic:
    """One worker's bytes of an optimizer step.

    Attributes:
        gradients: given to sums over workers. parameters: of weights that are
            gathered, over all passes. sent: by each worker, of both.
    """

    gradients: float
    parameters: float
    sent: float


def traffic(model: ModelLoad, step: StepLoad, engine: EngineLoad) -> Traffic:
    """Nothing for one worker. Gradients are those of what is trained alone: never of a frozen backbone."""
    workers = engine.workers
    if workers == 1:
        return Traffic(0.0, 0.0, 0.0)
    half = (workers - 1) / workers
    trained = model.most_trained
    if engine.layers_alone:
        return _of_layers(model, step, half)
    gradients = float(engine.gradient_bytes * trained)
    sums = step.accumulation if engine.gradients > 1 else 1  # divided gradients are summed after every micro-batch
    if engine.weights > 1:
        gathered = model.frozen * model.weight_bytes + trained * model.compute_bytes
        gathered *= PASSES * step.accumulation
        return Traffic(gradients * sums, gathered, half * (gradients * sums + gathered))
    if engine.optimizer > 1:
        updated = float(model.compute_bytes * trained)
        return Traffic(gradients * sums, updated, half * (gradients * sums + updated))
    return Traffic(gradients, 0.0, 2 * half * gradients)


def _of_layers(model: ModelLoad, step: StepLoad, half: float) -> Traffic:
    """Layers are gathered, and their gradients divided, for every micro-batch; the rest is summed once."""
    layers = model.trained_layers
    gathered = layers * MASTER + (model.in_layers - layers) * model.weight_bytes
    gathered *= PASSES * step.accumulation
    divided, whole = float(MASTER * layers * step.accumulation), float(MASTER * (model.most_trained - layers))
    return Traffic(divided + whole, gathered, half * (divided + gathered + 2 * whole))
