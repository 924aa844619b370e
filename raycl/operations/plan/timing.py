"""Expected seconds of an optimizer step, from its operations and bytes.

A linear costs 2 operations for each weight and token forward, 2 for the gradient of its input, and 2 more for its own
where it is trained: 6 N a token for N trained weights, 4 N for frozen ones. Gradient checkpointing repeats the forward
pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from raycl.operations.plan.hardware import Cluster
from raycl.operations.plan.traffic import Traffic
from raycl.operations.plan.workload import EngineLoad, Linear, ModelLoad, RunLoad, StepLoad


@dataclass(frozen=True)
class Seconds:
    """Expected seconds.

    Attributes:
        compute: of a step's operations. network: of its bytes. step: the larger of both, where they overlap, and
            their sum where they do not. loading: of the weights, once.
        training: of all steps and the method's extra passes; 0 where their number is not known.
    """

    compute: float
    network: float
    step: float
    loading: float
    training: float


def operations(model: ModelLoad, step: StepLoad) -> float:
    """Floating-point operations of one worker's step on mean examples."""
    rows = step.micro * step.accumulation
    return rows * sum(_of_linear(model, linear, step) for linear in model.linears)


def _of_linear(model: ModelLoad, linear: Linear, step: StepLoad) -> float:
    positions = step.logits[1] if linear.outputs == model.vocabulary and not linear.role else step.mean[linear.side]
    forward = 2.0 * linear.inputs * linear.outputs * positions
    scores = 4.0 * step.mean[linear.side] * step.mean[linear.keys] * linear.outputs if linear.keys else 0.0
    adapters = 2.0 * (linear.inputs + linear.outputs) * model.rows * positions if linear.adapted else 0.0
    passes = 3 if linear.trained else 2
    again = 1 if step.recompute else 0
    return forward * (passes + again) + (scores + adapters) * (3 + again)


def seconds(
    model: ModelLoad, step: StepLoad, engine: EngineLoad, run: RunLoad, sent: Traffic, cluster: Cluster
) -> Seconds:
    """See `Seconds`."""
    compute = operations(model, step) / (cluster.gpu.flops * cluster.utilisation)
    network = sent.sent / cluster.bandwidth
    overlaps = engine.weights > 1  # gathering of the next layer's weights; sums at the end of a step do not
    whole = max(compute, network) if overlaps else compute + network
    loading = model.parameters * model.compute_bytes / cluster.disk
    return Seconds(compute, network, whole, loading, whole * sum(run.steps) * (1 + run.extra))
