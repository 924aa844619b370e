"""Engines own gradients, the optimizer and the learning rate. Protocol, and plain PyTorch behind it.

The loss of a step is the token-summed cross-entropy over all micro-batches of all workers, divided by the number of all
those tokens: not a mean of means. So N workers, or any accumulation, equal one worker on the joined batch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from raycl.backbone import Backbone, Output
from raycl.methods.capabilities import Constraint
from raycl.methods.modifier import Modifiers
from raycl.training.engines.buckets import GradientBuckets
from raycl.training.optimizers.base import OptimizerKind, ParameterSpec
from raycl.training.optimizers.parameters import (
    advance,
    groups_of,
    hold,
    release,
    schedule,
    specs_of,
    state_of,
)
from raycl.training.optimizers.registry import optimizer_kind
from raycl.training.optimizers.settings import TrainConfig
from raycl.training.workers.distributed import DistributedContext, Scattered, is_dtensor, load_parameters, whole
from raycl.types import Batch

NONE = Modifiers()

NO_RATES: Mapping[str, float] = MappingProxyType({})
"""No parameter has a learning rate of its own."""

Transform = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Whole gradients by parameter name -> those that the optimizer uses."""


@dataclass(frozen=True)
class Share:
    """One worker's part of a checkpoint; it may be the engine's own memory, so write it before the next update.

    Attributes:
        parameters, optimizer: named as in `Engine.parameters` and `Engine.optimizer_state`.
        places: name of a parameter of which this is a part -> the first row, and the rows of the whole; or of a flat
            part the first element, and the whole's shape.
        is_part: other workers have shares too.
    """

    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    places: Mapping[str, tuple[int, int | list[int]]] = field(default_factory=dict)
    is_part: bool = False


class Engine(Protocol):
    """One task's optimizer around a backbone. Built when a phase begins, closed when it ends.

    Attributes:
        schedule: of the optimizer's learning rates.
    """

    schedule: torch.optim.lr_scheduler.LambdaLR

    @property
    def separate_masters(self) -> bool:
        """Return whether what is trained is kept in full precision beside the backbone, and goes when the engine
        closes."""
        ...

    @property
    def step_bytes(self) -> int:
        """The bytes that an optimizer step moves between workers: summed gradients and gathered weights."""
        ...

    def forward(self, batch: Batch) -> Output:
        """Run a teacher-forced pass."""
        ...

    def backward(self, loss_sum: Tensor, total: float) -> None:
        """Add the gradient of `loss_sum / total`; `total` is the step's count over all workers."""
        ...

    def step(
        self, modifiers: Modifiers = NONE, transform: Transform | None = None, constraint: Constraint | None = None
    ) -> float:
        """Return the sum over workers, transform, modify, clip, update, constrain, advance the schedule, clear
        gradients.

        Args:
            transform: whole gradients by name -> those to use (`Method.transform_gradients`).
            constraint: on what is updated (`Method.constraint`).

        Returns:
            the norm of the modified gradient before clipping.
        """
        ...

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return float(self.schedule.get_last_lr()[0])

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole parameters on the CPU, in full precision where they are trained. Collective: call on every worker."""
        ...

    def optimizer_state(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return `<parameter>/<state>` (exp_avg, ...) whole on the CPU; None: of all that train. Collective."""
        ...

    def share(self, names: Iterable[str]) -> Share:
        """Return what this worker writes of these parameters and the state of all that train. Collective."""
        ...

    def restore(self, parameters: dict[str, Tensor], optimizer: dict[str, Tensor], steps: int) -> None:
        """Go on after `steps` optimizer steps, with those parameters and that optimizer state. Collective."""
        ...

    def close(self) -> None:
        """Free everything that belongs to this phase and leave whole parameters in the backbone."""
        ...


class OpenEngine(Protocol):
    """Opens the engine of one phase, which has its learning rate by the phase's name; "": the common one."""

    def __call__(self, accumulation: int, steps: int, phase: str = "", /) -> Engine:
        """Return the engine around the backbone."""
        ...


class TorchEngine(Engine):
    """Plain PyTorch; with several workers, gradients are summed in buckets during the backward pass.

    Trained parameters are kept in float32; a bfloat16 backbone computes under autocast.

    Attributes:
        trained: the backbone's trained parameters by name.
        parts: the part of each parameter that this worker's optimizer updates.
    """

    def __init__(
        self,
        backbone: Backbone,
        train: TrainConfig,
        steps: int,
        world: DistributedContext,
        accumulation: int = 1,
        rates: Mapping[str, float] = NO_RATES,
        root: nn.Module | None = None,
    ) -> None:
        """Build the optimizer.

        Args:
            train: settings of the phase. steps: its optimizer steps. accumulation: micro-batches of a step.
            rates: parameters with learning rates of their own (`MethodConfig.learning_rates`).
            root: module through which passes of the backbone go; None: the backbone itself.
        """
        self.backbone, self.root = backbone, root or backbone
        self.accumulation = accumulation
        self.world = world
        self.max_grad_norm: float = train.max_grad_norm
        self.trained: dict[str, nn.Parameter] = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
        assert self.trained, "the method left no parameter to train"
        self.parts: dict[str, nn.Parameter] = {
            name: self._part_of(parameter) for name, parameter in self.trained.items()
        }
        copied = [self.parts[name] for name in self.trained if not self._is_shared(name)]
        self.buckets: GradientBuckets = GradientBuckets(copied, world, accumulation)
        self.kind: OptimizerKind = optimizer_kind(train)
        specs = specs_of(backbone, train, rates)
        self.specs: dict[str, ParameterSpec] = {
            name: replace(specs[name], shape=part.shape) for name, part in self.parts.items()
        }
        self.optimizer: torch.optim.Optimizer = self.kind.build(
            groups_of(self.parts, self.specs, self.kind.separates_matrices)
        )
        self.schedule = schedule(self.optimizer, train, steps)

    @property
    def separate_masters(self) -> bool:
        """The backbone's own parameters are in float32."""
        return False

    @property
    def step_bytes(self) -> int:
        """Gradients alone: no worker needs another's weights."""
        return self.buckets.step_bytes

    def _is_shared(self, name: str) -> bool:
        """Return whether each worker has a part of this parameter."""
        return False

    def _part_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the optimizer updates of a trained parameter, in float32."""
        parameter.data = parameter.data.float()
        return parameter

    def _gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a part, summed over workers."""
        return self.parts[name].grad

    def _whole(self, name: str, part: Tensor) -> Tensor:
        """Return a tensor of a part's shape with the parts of all workers."""
        return part

    def _own(self, name: str, value: Tensor) -> Tensor:
        """Return this worker's part of a full tensor of the parameter's shape."""
        return _laid_out_as(self.parts[name], value)

    def _norm(self) -> Tensor:
        return nn.utils.get_total_norm([part.grad for part in self.parts.values() if part.grad is not None])

    def forward(self, batch: Batch) -> Output:
        output: Output = self.root(batch)
        return output

    def backward(self, loss_sum: Tensor, total: float) -> None:
        """Add the gradient of `loss_sum / total`; that of the step's last micro-batch is summed meanwhile."""
        self.buckets.before_backward()
        (loss_sum / total).backward()  # type: ignore[no-untyped-call]

    def step(
        self, modifiers: Modifiers = NONE, transform: Transform | None = None, constraint: Constraint | None = None
    ) -> float:
        """Return the sum gradients over workers, transform, modify, clip, update, constrain."""
        self.buckets.finish()
        for name, part in self.parts.items():
            gradient = self._gradient(name)
            if gradient is None or gradient is not part.grad:
                part.grad = torch.zeros_like(part) if gradient is None else gradient
        if transform is not None:
            whole_of = {n: self._whole(n, part.grad) for n, part in self.parts.items() if part.grad is not None}
            for name, gradient in transform(whole_of).items():
                self.parts[name].grad = self._own(name, gradient)
        for name in modifiers.names:
            part = self.parts[name]
            assert part.grad is not None
            whole = self._whole(name, part.grad)
            changed = modifiers(name, whole)
            if changed is not whole or whole is not part.grad:  # otherwise it was changed in place
                part.grad = self._own(name, changed)
        norm = self._norm()
        nn.utils.clip_grads_with_norm_(self.parts.values(), self.max_grad_norm or float("inf"), norm)
        kept = []
        for name in modifiers.names if modifiers.holds else ():
            if self.kind.updates_rows and not self._is_shared(name):
                self._step_rows(modifiers, name)
            elif (held := modifiers.held(name)) is not None:
                held = self._own(name, held.expand(self.trained[name].shape))
                kept += hold(self.parts[name], self._state(name), held)
        constrained = () if constraint is None else constraint.names
        before = {name: self._whole(name, self.parts[name].detach()).clone() for name in constrained}
        self.optimizer.step()
        release(kept)
        if constraint is not None:
            for name, old in before.items():
                updated = self.parts[name].detach()
                updated.copy_(self._own(name, constraint(name, old, self._whole(name, updated))))
        self.schedule.step()
        self._clear_gradients()
        return float(norm)

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad()

    def _step_rows(self, modifiers: Modifiers, name: str) -> None:
        """Update the rows that may move, where others are held, and leave nothing to the optimizer's own step."""
        held, parameter = modifiers.held(name), self.parts[name]
        if held is None:
            return
        axis = max(range(held.dim()), key=lambda axis: held.shape[axis])
        assert held.numel() == held.shape[axis], "only whole rows can be held"
        rows = (~held).flatten().nonzero().squeeze(1)
        self.kind.step_rows(self.optimizer, parameter, rows, axis)
        parameter.grad = None

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies on the CPU."""
        own = dict(self.backbone.named_parameters())
        return {name: whole(own[name].detach()).cpu().clone() for name in names}

    def _state(self, name: str) -> dict[str, Tensor]:
        """Return the state of a part; zeros before the first step."""
        return state_of(self.kind, self.optimizer, self.parts[name], self.specs[name])

    def optimizer_state(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the optimizer's state on the CPU; zeros before the first step."""
        return {
            f"{name}/{moment}": self._whole(name, value.detach()).cpu().clone()
            for name in (self.trained if names is None else names)
            for moment, value in self._state(name).items()
        }

    def share(self, names: Iterable[str]) -> Share:
        """Return everything on the first worker, and elsewhere this worker's rows of what is shared out; nothing is
        copied."""
        optimizer = {
            f"{name}/{moment}": value.detach()
            for name in self.parts
            if self.world.is_first or self._is_shared(name)
            for moment, value in self._state(name).items()
        }
        return replace(weights_of(self.backbone, names, self.world), optimizer=optimizer)

    def restore(self, parameters: dict[str, Tensor], optimizer: dict[str, Tensor], steps: int) -> None:
        """Fill parameters and the optimizer's state, and move the schedule on."""
        load_parameters(self.backbone, parameters)
        for name, part in self.parts.items():
            wanted = self.kind.state(self.specs[name])
            moments = {moment: self._own(name, optimizer[f"{name}/{moment}"]) for moment in wanted}
            self.optimizer.state[part] = {**moments, **self.kind.counters(part, self.specs[name], steps)}
        advance(self.schedule, steps)

    def close(self) -> None:
        self.buckets.close()
        self.optimizer.state.clear()
        self._clear_gradients()


def weights_of(backbone: Backbone, names: Iterable[str], world: DistributedContext) -> Share:
    """Return the backbone's own parameters as what this worker writes: its rows of those that are shared out, and on
    the first worker all others. Nothing is copied."""
    own = dict(backbone.named_parameters())
    mine = {name: own[name] for name in names if world.is_first or is_dtensor(own[name])}
    counts = {name: value.shape[0] for name, value in mine.items() if is_dtensor(value)}  # dealt as by `torch.chunk`
    places = {name: (min(world.rank * -(-count // world.size), count), count) for name, count in counts.items()}
    is_part = any(is_dtensor(parameter) for parameter in own.values())
    rows = {name: (value.to_local() if is_dtensor(value) else value).detach() for name, value in mine.items()}
    return Share(rows, places=places, is_part=is_part)


def scattered(share: Share, shapes: Mapping[str, Tensor], world: DistributedContext) -> dict[str, Tensor]:
    """Return the parameters of all workers' shares, each to be put together when it is needed (`whole`); nothing is
    copied.

    Args:
        shapes: tensors with the full shapes, by name.
    """
    parts: dict[str, Tensor] = {}
    for name, shape in ((name, tensor.shape) for name, tensor in shapes.items()):
        part = share.parameters.get(name, torch.empty(0, device=world.device))
        first, of = share.places.get(name, (0, 0))
        parts[name] = Scattered(
            part.reshape(-1), first if isinstance(of, list) else first * shape[1:].numel(), shape, world
        )
    return parts


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Move a tensor to the parameter's device and strides, since AdamW's fused kernel reads raw memory."""
    value = value.to(parameter.device)
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
