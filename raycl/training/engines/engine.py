"""Engines own gradients, the optimizer and the learning rate. Protocol, and plain PyTorch behind it.

The loss of a step is the token-summed cross-entropy over all micro-batches of all workers, divided by the number
of all those tokens: not a mean of means. So N workers, or any accumulation, equal one worker on the joined batch.
What it does not know: methods, tasks, data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from raycl.backbone import Backbone, Output
from raycl.kernels.row_gradient import adamw_rows
from raycl.methods.modifier import Modifiers
from raycl.training.distributed import DistributedContext
from raycl.training.engines.optimizers import MOMENTS, hold, optimizer_of, release, set_state, state_names, state_of
from raycl.training.settings import TrainConfig
from raycl.types import Batch

NONE = Modifiers()

Transform = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Whole gradients by parameter name -> those that the optimizer uses."""


class Engine(Protocol):
    """One task's optimizer around a backbone. Built when a phase begins, closed when it ends."""

    def forward(self, batch: Batch) -> Output:
        """Teacher-forced pass."""
        ...

    def backward(self, loss_sum: Tensor, total: float) -> None:
        """Add the gradient of `loss_sum / total`; `total` is the step's count over all workers."""
        ...

    def step(self, modifiers: Modifiers = NONE, transform: Transform | None = None) -> float:
        """Sum over workers, transform, modify, clip, update, advance the schedule, clear gradients.

        Args:
            transform: whole gradients by name -> those to use (`Method.transform_gradients`).

        Returns:
            the norm of the modified gradient before clipping.
        """
        ...

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        ...

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole parameters on the CPU, in full precision where they are trained. Collective: call on every worker."""
        ...

    def optimizer_state(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """`<parameter>/<state>` (exp_avg, ...) whole on the CPU; None: of all that train. Collective."""
        ...

    def restore(self, parameters: dict[str, Tensor], optimizer: dict[str, Tensor], steps: int) -> None:
        """Go on after `steps` optimizer steps, with those parameters and that optimizer state. Collective."""
        ...

    def close(self) -> None:
        """Free everything that belongs to this phase and leave whole parameters in the backbone."""
        ...


def schedule(optimizer: Optimizer, train: TrainConfig, steps: int) -> LambdaLR:
    """The Hugging Face schedule of that name over `steps` optimizer steps."""
    from transformers import get_scheduler  # brings peft: a third of a driver's start, which makes none

    warmup = train.warmup(steps)
    scheduler = get_scheduler(train.lr_scheduler, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    assert isinstance(scheduler, LambdaLR), f"{train.lr_scheduler} is no function of the step, so it cannot be resumed"
    return scheduler


class TorchEngine:
    """Plain PyTorch; with several workers, one flat sum of gradients at the step boundary.

    Trained parameters are kept in float32; a bfloat16 backbone computes under autocast.
    """

    def __init__(self, backbone: Backbone, train: TrainConfig, steps: int, world: DistributedContext) -> None:
        self.backbone = backbone
        self.world = world
        self.max_grad_norm = train.max_grad_norm
        self.trained = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
        assert self.trained, "the method left no parameter to train"
        for parameter in self.trained.values():
            parameter.data = parameter.data.float()
        self.optimizer = optimizer_of(self.trained, train)
        self.schedule = schedule(self.optimizer, train, steps)

    def forward(self, batch: Batch) -> Output:
        """Teacher-forced pass."""
        output: Output = self.backbone(batch)
        return output

    def backward(self, loss_sum: Tensor, total: float) -> None:
        """Add the gradient of `loss_sum / total`."""
        (loss_sum / total).backward()  # type: ignore[no-untyped-call]

    def step(self, modifiers: Modifiers = NONE, transform: Transform | None = None) -> float:
        """Sum gradients over workers, transform, modify, clip, update."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.trained.values()]
        if self.world.size > 1:
            gradients = self._summed(gradients)
        if transform is not None:
            changed = transform(dict(zip(self.trained, gradients, strict=True)))
            gradients = [changed[name] for name in self.trained]
        for parameter, gradient in zip(self.trained.values(), gradients, strict=True):
            parameter.grad = gradient
        for name in modifiers.names:
            parameter = self.trained[name]
            assert parameter.grad is not None
            parameter.grad = _laid_out_as(parameter, modifiers(name, parameter.grad))
        norm = nn.utils.clip_grad_norm_(self.trained.values(), self.max_grad_norm or float("inf"))
        kept = []
        for name in modifiers.names:
            if isinstance(self.optimizer, AdamW):
                self._step_rows(modifiers, name)
            elif (held := modifiers.held(name)) is not None:
                kept += hold(self.optimizer, self.trained[name], held)
        self.optimizer.step()
        release(kept)
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _step_rows(self, modifiers: Modifiers, name: str) -> None:
        """Update the rows that may move, where others are held, and leave nothing to the optimizer's own step."""
        held, parameter = modifiers.held(name), self.trained[name]
        if held is None:
            return
        axis = max(range(held.dim()), key=lambda axis: held.shape[axis])
        assert held.numel() == held.shape[axis], "only whole rows can be held"
        state = self.optimizer.state[parameter]
        if not state:  # as Adam itself begins
            state["step"] = torch.tensor(0.0)
            state |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        state["step"] += 1
        group = next(group for group in self.optimizer.param_groups if any(p is parameter for p in group["params"]))
        rows = (~held).flatten().nonzero().squeeze(1)
        adamw_rows(parameter, (state["exp_avg"], state["exp_avg_sq"]), rows, axis, int(state["step"]), group)
        parameter.grad = None

    def _summed(self, gradients: list[Tensor]) -> list[Tensor]:
        flat = self.world.sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        sizes = [gradient.numel() for gradient in gradients]
        return [part.view_as(old) for part, old in zip(torch.split(flat, sizes), gradients, strict=True)]

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return float(self.schedule.get_last_lr()[0])

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies on the CPU."""
        own = dict(self.backbone.named_parameters())
        return {name: own[name].detach().cpu().clone() for name in names}

    def optimizer_state(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The optimizer's state on the CPU; zeros before the first step."""
        return {
            f"{name}/{moment}": value.detach().cpu().clone()
            for name in (self.trained if names is None else names)
            for moment, value in state_of(self.optimizer, self.trained[name]).items()
        }

    def restore(self, parameters: dict[str, Tensor], optimizer: dict[str, Tensor], steps: int) -> None:
        """Fill parameters and the optimizer's state, and move the schedule on."""
        load_parameters(self.backbone, parameters)
        for name, parameter in self.trained.items():
            wanted = state_names(self.optimizer, parameter)
            found = {moment: _laid_out_as(parameter, optimizer[f"{name}/{moment}"]) for moment in wanted}
            set_state(self.optimizer, parameter, found, steps)
        advance(self.schedule, steps)

    def close(self) -> None:
        """Drop the optimizer."""
        self.optimizer.state.clear()
        self.optimizer.zero_grad()


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """On the parameter's device, with its strides: AdamW's fused kernel reads memory as it lies."""
    value = value.to(parameter.device)
    if value.shape != parameter.shape:
        return value
    return value if value.stride() == parameter.stride() else torch.empty_like(parameter).copy_(value)


def advance(scheduler: LambdaLR, steps: int) -> None:
    """Put a fresh schedule where it would be after `steps` steps."""
    state = scheduler.state_dict()
    rates = [base * rate(steps) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict({**state, "last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def load_parameters(backbone: Backbone, parameters: dict[str, Tensor]) -> None:
    """Copy values into the backbone's parameters of those names."""
    own = dict(backbone.named_parameters())
    with torch.no_grad():
        for name, value in parameters.items():
            own[name].copy_(value)
