"""What a plan is computed from: the sizes of a model, of what is trained of it, and of a step. Numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MASTER = 4
"""Bytes of a trained parameter and of its gradient: float32."""


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        role: of `raycl.backbone.roles.ROLES`, or "" (a head over the vocabulary).
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
        parameters: of the backbone, before anything is added.
        trained: parameters that are trained in each phase. trained_base: of these, the backbone's own, in each phase.
        adapters: parameters of all adapters when the last phase has ended.
        rows: ranks of all of them added up. pool: adapter parameters that the device keeps of earlier tasks, at last.
        method: float32 values that the method keeps for each trained parameter, at most.
        linears: every one. vocabulary: of the logits; 0: label heads.
        heads: attention heads. score_bytes: that attention keeps of each pair of positions and head; 0: none.
        in_layers: parameters of the backbone's layers. largest_layer: of the largest of them.
        weight_bytes: of a frozen parameter, on average. compute_bytes: of an activation, and of a weight
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
        """Of the phase that trains most."""
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
    """How an engine divides what it holds among workers.

    Attributes:
        name: as in the config. workers: of the run.
        weights, gradients, optimizer: into how many parts each is divided; 1: each worker has all.
        separate_masters: float32 copies of trained weights beside those that are computed with; else in their place.
        gradient_bytes: of a gradient. bucket: parameters whose gradients are summed at once, beside them.
        gathered: parameters of divided weights that are whole at a time.
        layers_alone: what stands outside of the model's layers, adapters too, is whole on every worker.
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
        optimizer_bytes: what the optimizer keeps for a trained parameter, on average.
        disk: name -> bytes (`raycl.training.disk_space`).
        extra: passes beside those of the steps, as a share of these (`MethodConfig.extra_passes`).
    """

    steps: tuple[int, ...]
    optimizer_bytes: float
    disk: Mapping[str, int] = field(default_factory=dict)
    extra: float = 0.0
