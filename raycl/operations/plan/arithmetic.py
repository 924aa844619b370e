"""The arithmetic of a plan: GPUs and nodes, the sizes of a model, and from them bytes and seconds. Numbers alone.

Activations are what autograd keeps of each layer, by the layers' own code: a frozen linear keeps nothing, one that is
trained or adapted its input, a norm its input in float32, attention its queries, keys, values and output, a gated
feed-forward block three times its inner width. `tests/unit/operations/test_plan.py` compares with what torch keeps.

For the sum of a tensor of S bytes that all N workers get, each sends 2 (N - 1) / N S in a ring, and half of that where
each gets a part of the sum, or where parts are gathered.

A linear costs 2 operations for each weight and token forward, 2 for the gradient of its input, and 2 more for its own
where it is trained: 6 N a token for N trained weights, 4 N for frozen ones. Gradient checkpointing repeats the forward
pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapreplace

from raycl.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """A GPU and its share of a node.

    Attributes:
        memory: bytes on the card. flops: dense bfloat16 FLOP/s of the tensor cores at their highest.
        link: bytes per second that it sends to its neighbours in the node, in one direction.
        network: bytes per second that a node of eight sends to other nodes. host: bytes of memory of such a node.
        ray: Ray's name of it (`accelerator_type`).
    """

    memory: float
    flops: float
    link: float
    network: float
    host: float
    ray: str


GB, TFLOPS, GIB = 1e9, 1e12, 2**30
GBIT = 1e9 / 8

GPUS = {
    # NVIDIA A10G data sheet: 24 GB, bfloat16 70 TFLOPS dense, PCIe 4.0 x16 64 GB/s in both directions together.
    # AWS, EC2 G5: g5.48xlarge, 8 GPUs, 768 GiB, 100 Gbit/s.
    "a10g-24": Gpu(24 * GB, 70 * TFLOPS, 32 * GB, 100 * GBIT, 768 * GIB, "A10G"),
    # NVIDIA L4 data sheet: 24 GB, bfloat16 242 TFLOPS with sparsity, so 121 dense, PCIe 4.0 x16 64 GB/s.
    # AWS, EC2 G6: g6.48xlarge, 8 GPUs, 768 GiB, 100 Gbit/s.
    "l4-24": Gpu(24 * GB, 121 * TFLOPS, 32 * GB, 100 * GBIT, 768 * GIB, "L4"),
    # NVIDIA A100 data sheet: 40 GB, bfloat16 312 TFLOPS dense, NVLink 600 GB/s in both directions together.
    # AWS, EC2 P4: p4d.24xlarge, 8 GPUs, 1,152 GiB, 400 Gbit/s.
    "a100-40": Gpu(40 * GB, 312 * TFLOPS, 300 * GB, 400 * GBIT, 1152 * GIB, "A100"),
    # NVIDIA A100 80GB data sheet: as above with 80 GB. AWS, EC2 P4: p4de.24xlarge, as above.
    "a100-80": Gpu(80 * GB, 312 * TFLOPS, 300 * GB, 400 * GBIT, 1152 * GIB, "A100-80G"),
    # NVIDIA H100 SXM data sheet: 80 GB, bfloat16 1,979 TFLOPS with sparsity, so 989 dense, NVLink 900 GB/s.
    # AWS, EC2 P5: p5.48xlarge, 8 GPUs, 2,048 GiB, 3,200 Gbit/s.
    "h100-80": Gpu(80 * GB, 989 * TFLOPS, 450 * GB, 3200 * GBIT, 2048 * GIB, "H100"),
    # NVIDIA H200 SXM data sheet: 141 GB, arithmetic and NVLink of the H100. AWS, EC2 P5: p5en.48xlarge, as above.
    "h200-141": Gpu(141 * GB, 989 * TFLOPS, 450 * GB, 3200 * GBIT, 2048 * GIB, "H200"),
}
"""Name -> GPU."""

NODE = 8
"""GPUs of the nodes in the table."""


@dataclass(frozen=True)
class Cluster:
    """The cluster of a plan.

    Attributes:
        gpus: all of them, one worker each. per_node: on each node, which has that share of a node of eight.
        utilisation: share of `Gpu.flops` that training reaches. disk: bytes per second that a node reads weights with.
    """

    gpu: Gpu
    gpus: int = 1
    per_node: int = NODE
    utilisation: float = 0.4
    disk: float = 2 * GB

    @property
    def on_node(self) -> int:
        """GPUs that work together on one node."""
        return min(self.gpus, self.per_node)

    @property
    def nodes(self) -> int:
        """Nodes that hold so many."""
        return -(-self.gpus // self.per_node)

    @property
    def host(self) -> float:
        """Bytes of memory of one node."""
        return self.gpu.host * min(1.0, self.per_node / NODE)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a ring over all workers: that of its slowest part, where it leaves a node."""
        network = self.gpu.network * min(1.0, self.per_node / NODE)
        return self.gpu.link if self.nodes == 1 else min(self.gpu.link, network)


def gpu_named(name: str) -> Gpu:
    """Return the GPU of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu is '{name}': expected one of {', '.join(GPUS)}")
    return GPUS[name]


# ---- a run in numbers ------------------------------------------------------------------------------------------------

MASTER = 4
"""Bytes of a trained parameter and of its gradient: float32."""


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        role: a role of `raycl.backbone.roles.ROLES`, or "" (a head over the vocabulary).
        side: whose positions it works on. keys: those that its attention looks at, for query projections.
        adapted: adapters are attached. trained: its own weight is. gated: one of two that are multiplied.
        keeps_input: its input is kept for a weight's or an adapter's gradient, and for no other layer's.
        kept: width of what attention or activation keep of its output (keys and values are repeated for all heads).
    """

    role: str
    inputs: int
    outputs: int
    side: str = "source"
    keys: str = ""
    adapted: bool = False
    trained: bool = False
    gated: bool = False
    keeps_input: bool = False
    kept: int = 0


@dataclass(frozen=True)
class ModelLoad:
    """A backbone and what a method trains of it.

    Attributes:
        parameters: number of the backbone's parameters, before anything is added.
        trained: parameters that are trained in each phase. trained_base: of these, the backbone's own, in each phase.
        adapters: parameters of all adapters when the last phase has ended.
        rows: ranks of all of them added up. pool: adapter parameters that the device keeps of earlier tasks, at last.
        method: float32 values that the method keeps for each trained parameter, at most.
        linears: all linears. vocabulary: width of the logits; 0: label heads.
        heads: attention heads. score_bytes: bytes that attention keeps of each pair of positions and head; 0: none.
        in_layers: parameters of the backbone's layers. largest_layer: parameters of the largest layer.
        weight_bytes: mean bytes of a frozen parameter. compute_bytes: bytes of an activation, and of a weight
            as it is loaded.
        mapped: files have the dtype that computes, so that a node's workers share one memory-mapped copy.
    """

    parameters: int
    trained: tuple[int, ...]
    trained_base: tuple[int, ...]
    adapters: int
    rows: int
    pool: int
    method: int
    linears: tuple[Linear, ...]
    vocabulary: int
    heads: int
    score_bytes: int
    in_layers: int
    largest_layer: int
    weight_bytes: float
    compute_bytes: int
    mapped: bool

    @property
    def most_trained(self) -> int:
        """The trained parameters of the phase that trains most."""
        return max(self.trained)

    @property
    def frozen(self) -> int:
        """Parameters of the backbone that stay as they are, in that phase."""
        return self.parameters - self.trained_base[self.trained.index(self.most_trained)]

    @property
    def trained_layers(self) -> int:
        """Parameters of layers that are trained, in that phase: all or none."""
        return self.in_layers if self.frozen < self.parameters else 0


@dataclass(frozen=True)
class StepLoad:
    """An optimizer step of one worker.

    Attributes:
        micro: examples of a forward pass. accumulation: forward passes.
        longest: side -> tokens of the longest example. mean: side -> tokens of a mean one, padding included.
        logits: positions of an example that carry loss, so that logits are computed, of the longest and of a mean one.
        recompute: gradient checkpointing.
    """

    micro: int
    accumulation: int
    longest: Mapping[str, int]
    mean: Mapping[str, float]
    logits: tuple[float, float]
    recompute: bool = False


@dataclass(frozen=True)
class EngineLoad:
    """Describes how an engine divides parameters among workers.

    Attributes:
        name: name in the config. workers: number of workers of the run.
        weights, gradients, optimizer: into how many parts each is divided; 1: each worker has all.
        separate_masters: float32 copies of trained weights besides those that are computed with; else in their place.
        gradient_bytes: bytes of a gradient. bucket: parameters whose gradients are summed at once, in extra memory.
        gathered: parameters of divided weights that are whole at a time.
        layers_alone: parameters outside of the model's layers, and adapters, are complete on every worker.
        loads_whole: each worker has all weights on its device before they are divided.
        on_host: masters and optimizer state are in CPU memory.
    """

    name: str
    workers: int
    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    separate_masters: bool = False
    gradient_bytes: int = MASTER
    bucket: int = 0
    gathered: int = 0
    layers_alone: bool = False
    loads_whole: bool = True
    on_host: bool = False

    def share(self, in_layers: float, outside: float, parts: int) -> float:
        """Return what a worker holds of so much that belongs to layers, and so much that does not."""
        return in_layers / parts + (outside if self.layers_alone else outside / parts)


@dataclass(frozen=True)
class RunLoad:
    """The rest of a run that costs something.

    Attributes:
        steps: optimizer steps of each phase; empty: not known without the data.
        optimizer_bytes: mean bytes that the optimizer keeps for a trained parameter.
        disk: name -> bytes (`raycl.training.phase.disk_space`).
        extra: passes in addition to those of the steps, as a share of these (`MethodConfig.extra_passes`).
        parallel_tasks: phases that are trained at the same time, each by as many workers as the plan has.
    """

    steps: tuple[int, ...]
    optimizer_bytes: float
    disk: Mapping[str, int] = field(default_factory=dict)
    extra: float = 0.0
    parallel_tasks: int = 1

    @property
    def steps_in_turn(self) -> int:
        """The steps that are taken one after another: those of the worker group with the most, where each group that
        is free trains the next phase."""
        groups = [0] * self.parallel_tasks
        for steps in self.steps:
            heapreplace(groups, groups[0] + steps)
        return max(groups)


# ---- memory ----------------------------------------------------------------------------------------------------------

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
    bytes_by_part = {
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
    peak = sum(bytes_by_part.values())
    loading = CONTEXT + (model.parameters * model.weight_bytes if engine.loads_whole else bytes_by_part["weights"])
    return {**bytes_by_part, "loading": loading, "peak": max(peak, loading)}


def activations(model: ModelLoad, step: StepLoad, recompute: bool | None = None) -> float:
    """Return bytes that autograd keeps of one forward pass of the longest examples.

    Args:
        recompute: use gradient checkpointing; None: as configured.
    """
    whole = sum(kept_of(model, linear, step) for linear in model.linears)
    if not (step.recompute if recompute is None else recompute):
        return whole
    blocks = [linear for linear in model.linears if linear.role == "ffn.out"]
    inputs = sum(linear.outputs * tokens(linear.side, step) * model.compute_bytes for linear in blocks)
    return inputs + whole / max(1, len(blocks))


def kept_of(model: ModelLoad, linear: Linear, step: StepLoad) -> float:
    """Return bytes that are kept because of a linear and what stands around it, attention's pairs of positions too."""
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
    if linear.keys:
        kept += model.score_bytes * model.heads * step.longest[linear.keys]
    return kept * tokens(linear.side, step)


def tokens(side: str, step: StepLoad) -> int:
    """Return positions of one forward pass of the longest examples."""
    return step.micro * step.longest[side]


def logits(model: ModelLoad, step: StepLoad) -> float:
    """Return bytes of the logits as computed, of float32 log-probabilities, and of the gradient of those."""
    return step.micro * step.logits[0] * model.vocabulary * (model.compute_bytes + 2 * MASTER)


def host_memory(model: ModelLoad, engine: EngineLoad, run: RunLoad, on_node: int) -> dict[str, float]:
    """Return what a node's memory holds while weights are loaded, in training, and of that for a checkpoint."""
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


# ---- traffic ---------------------------------------------------------------------------------------------------------

PASSES = 2
"""The passes for which weights are gathered: forward, and backward with recomputation."""


@dataclass(frozen=True)
class Traffic:
    """One worker's bytes of an optimizer step.

    Attributes:
        gradients: bytes summed over workers. parameters: bytes of weights that are
            gathered, over all passes. sent: bytes of both that each worker sends.
    """

    gradients: float
    parameters: float
    sent: float


def traffic(model: ModelLoad, step: StepLoad, engine: EngineLoad) -> Traffic:
    """Return the traffic of a step, which is 0 for one worker. Only trained parameters have gradients."""
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


# ---- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seconds:
    """Expected seconds.

    Attributes:
        compute: time of a step's operations. network: time of its bytes. step: the larger of both, where they overlap,
            and their sum where they do not. loading: time of loading the weights, once.
        training: time of all steps and the method's extra passes; 0 where their number is unknown.
    """

    compute: float
    network: float
    step: float
    loading: float
    training: float


def operations(model: ModelLoad, step: StepLoad) -> float:
    """Return the floating-point operations of one worker's step on mean examples."""
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
    compute = operations(model, step) / (cluster.gpu.flops * cluster.utilisation)
    network = sent.sent / cluster.bandwidth
    overlaps = engine.weights > 1  # gathering of the next layer's weights; sums at the end of a step do not
    whole = max(compute, network) if overlaps else compute + network
    loading = model.parameters * model.compute_bytes / cluster.disk
    return Seconds(compute, network, whole, loading, whole * run.steps_in_turn * (1 + run.extra))
