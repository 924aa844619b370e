"""Bytes that a worker's GPU and a node's host memory hold.

Activations are what autograd keeps of each layer, by the layers' own code: a frozen linear keeps nothing, one that is
trained or adapted its input, a norm its input in float32, attention its queries, keys, values and output, a gated
feed-forward block three times its inner width. `tests/unit/run/test_plan.py` compares with what torch keeps.
"""

from __future__ import annotations

from raycl.operations.plan.workload import MASTER, EngineLoad, Linear, ModelLoad, RunLoad, StepLoad

CONTEXT = 1.0e9
"""CUDA's context, kernels and NCCL's buffers on a device: an assumption, usually 0.5 to 1 GB."""

PROCESS = 3.0e9
"""Host memory of one worker with torch and CUDA in it, without any weights: an assumption, usually 2 to 3 GB."""

QKV = ("attention.query", "attention.key", "attention.value", "attention.qkv")


def gpu_memory(model: ModelLoad, step: StepLoad, engine: EngineLoad, run: RunLoad) -> dict[str, float]:
    """Return what one GPU holds at the step's highest point, by name, and their sum as `peak`."""
    trained, layers, base = model.most_trained, model.trained_layers, model.parameters - model.frozen
    held = model.compute_bytes if engine.separate_masters else MASTER
    copies = model.compute_bytes if held > model.compute_bytes else 0  # autocast's, of what is trained
    masters = 0 if engine.on_host or not engine.separate_masters else MASTER
    optimizer = 0 if engine.on_host else run.optimizer_bytes
    frozen_layers = model.in_layers - layers
    weights = engine.share(
        frozen_layers * model.weight_bytes + layers * held,
        (model.frozen - frozen_layers) * model.weight_bytes + (base - layers) * held,
        engine.weights,
    )
    found = {
        "weights": weights,
        "adapters": engine.share(0, (trained - base) * held, engine.weights) + model.pool * model.compute_bytes,
        "compute_copies": copies * trained,
        "masters": masters * trained / engine.optimizer,
        "gradients": engine.gradient_bytes * engine.share(layers, trained - layers, engine.gradients),
        "gradient_bucket": engine.gradient_bytes * min(engine.bucket, trained),
        "gathered_weights": (held if layers else model.weight_bytes) * min(engine.gathered, model.parameters),
        "optimizer": optimizer * engine.share(layers, trained - layers, engine.optimizer),
        "kept_by_method": MASTER * model.method * trained,
        "activations": activations(model, step),
        "logits": logits(model, step),
        "context": CONTEXT,
    }
    peak = sum(found.values())
    loading = CONTEXT + (model.parameters * model.weight_bytes if engine.loads_whole else found["weights"])
    return {**found, "loading": loading, "peak": max(peak, loading)}


def activations(model: ModelLoad, step: StepLoad, recompute: bool | None = None) -> float:
    """Return bytes that autograd keeps of one forward pass of the longest examples.

    Args:
        recompute: with gradient checkpointing; None: as configured.
    """
    whole = sum(kept_of(model, linear, step) for linear in model.linears)
    whole += sum(scores_of(model, linear, step) for linear in model.linears)
    if not (step.recompute if recompute is None else recompute):
        return whole
    blocks = [linear for linear in model.linears if linear.role == "ffn.out"]
    inputs = sum(linear.outputs * tokens(linear.side, step) * model.compute_bytes for linear in blocks)
    return inputs + whole / max(1, len(blocks))


def kept_of(model: ModelLoad, linear: Linear, step: StepLoad) -> float:
    """Return bytes that are kept because of a linear and what stands around it."""
    kept = 0.0
    if linear.role in ("attention.out", "ffn.out"):
        kept += MASTER * linear.outputs  # the input of the norm in front of the block, in float32
    if not linear.role and linear.outputs == model.vocabulary:
        kept += MASTER * linear.inputs
    if linear.role in QKV:
        kept += model.compute_bytes * linear.kept
    if linear.role == "attention.out":
        kept += model.compute_bytes * linear.inputs
    if linear.role == "ffn.in":
        kept += model.compute_bytes * linear.kept * (2 if linear.gated else 1)
    if linear.keeps_input:
        kept += model.compute_bytes * linear.inputs
    if linear.trained and linear.role in ("attention.out", "ffn.out"):
        kept += model.compute_bytes * linear.outputs  # the norm's output before its trained weight
    return kept * tokens(linear.side, step)


def scores_of(model: ModelLoad, linear: Linear, step: StepLoad) -> float:
    """Return bytes of what attention keeps of each pair of positions."""
    if not linear.keys:
        return 0.0
    return float(model.score_bytes * model.heads * tokens(linear.side, step) * step.longest[linear.keys])


def tokens(side: str, step: StepLoad) -> int:
    """Return positions of one forward pass of the longest examples."""
    return step.micro * step.longest[side]


def logits(model: ModelLoad, step: StepLoad) -> float:
    """Return bytes of the logits and their loss: as computed, log-probabilities in float32, and the gradient of
    those."""
    return step.micro * step.logits[0] * model.vocabulary * (model.compute_bytes + 2 * MASTER)


def host_memory(model: ModelLoad, engine: EngineLoad, run: RunLoad, on_node: int) -> dict[str, float]:
    """Return what a node's memory holds: while weights are loaded, in training, and of that for writing a
    checkpoint."""
    trained = model.most_trained
    offloaded = (MASTER + run.optimizer_bytes) * trained / engine.optimizer if engine.on_host else 0.0
    checkpoint = writing(model, on_node)
    copies = 1 if model.mapped else on_node
    return {
        "loading": on_node * PROCESS + copies * model.parameters * model.compute_bytes,
        "training": on_node * (PROCESS + offloaded) + checkpoint,
        "checkpoint": checkpoint,
    }


def writing(model: ModelLoad, on_node: int) -> float:
    """Host memory for a checkpoint. Adapters are copied by every worker at a task's end.

    A trained backbone is written one tensor, or part of one, at a time; the largest is outside of its layers.
    """
    if not model.trained_layers:
        return float(MASTER * model.most_trained * on_node)
    largest = max(model.parameters - model.in_layers, *(linear.inputs * linear.outputs for linear in model.linears))
    return float(MASTER * largest)
