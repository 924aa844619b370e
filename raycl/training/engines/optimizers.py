"""Optimizers by name, and their state as named tensors that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from raycl.training.settings import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state tensors, by torch's names; DeepSpeed uses the same."""

PROJECTION = ("attention.down", "attention.up")
"""SAPT's D and U, which alone learn at `attention_learning_rate`; keys and layer norm learn at the main rate, as in the
released code (`trans_input` in its cl_trainer.py)."""


TASK_HEAD = ("task_head.",)
"""IDBR's head over tasks, which learns at `task_learning_rate`."""


def optimizer_of(trained: Mapping[str, nn.Parameter], train: TrainConfig) -> Optimizer:
    """The configured optimizer; what has a learning rate of its own is a group of its own."""
    groups = _groups(trained, train)
    if train.optimizer == "adamw":
        return _adamw(groups, trained, train)
    if train.optimizer == "sgd":
        return SGD(groups, lr=train.learning_rate, momentum=train.momentum, weight_decay=train.weight_decay)
    from transformers.optimization import Adafactor  # a second of imports

    # as the Hugging Face trainer has it, which the papers' code uses: the rate is the configured one
    found: Optimizer = Adafactor(
        groups,
        lr=train.learning_rate,
        scale_parameter=False,
        relative_step=False,
        warmup_init=False,
        weight_decay=train.weight_decay,
    )
    return found


def _groups(trained: Mapping[str, nn.Parameter], train: TrainConfig) -> list[dict[str, Any]]:
    rates = {
        ("head.",): train.head_learning_rate,
        PROJECTION: train.attention_learning_rate,
        TASK_HEAD: train.task_learning_rate,
    }
    own = {starts: rate for starts, rate in rates.items() if rate is not None}
    others = [p for name, p in trained.items() if not any(name.startswith(starts) for starts in own)]
    groups: list[dict[str, Any]] = [{"params": others}]
    for starts, rate in own.items():
        groups.append({"params": [p for name, p in trained.items() if name.startswith(starts)], "lr": rate})
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], trained: Mapping[str, nn.Parameter], train: TrainConfig) -> AdamW:
    """On a CPU torch's fused kernel: one pass over memory instead of ten, a sixth of the time."""
    return AdamW(
        groups,
        lr=train.learning_rate,
        betas=train.betas,
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        fused=True if all(p.device.type == "cpu" for p in trained.values()) else None,
    )


def first_moment(train: TrainConfig) -> tuple[str, float] | None:
    """Name and decay rate of the running average of gradients, where the optimizer has one of nothing else.

    SGD's takes in its weight decay too.
    """
    if train.optimizer == "adamw":
        return MOMENTS[0], train.betas[0]
    alone = train.optimizer == "sgd" and train.momentum and not train.weight_decay
    return ("momentum_buffer", train.momentum) if alone else None


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """State tensors of a parameter by name; zeros before the first step."""
    state = optimizer.state.get(parameter, {})
    return {
        name: state[name] if isinstance(state.get(name), Tensor) else torch.zeros(shape, device=parameter.device)
        for name, shape in _shapes(optimizer, parameter).items()
    }


def set_state(optimizer: Optimizer, parameter: nn.Parameter, tensors: Mapping[str, Tensor], steps: int) -> None:
    """Put state tensors in place, as after `steps` steps."""
    state: dict[str, Any] = dict(tensors)
    if isinstance(optimizer, AdamW):
        state["step"] = torch.tensor(float(steps))
    elif not isinstance(optimizer, SGD):
        state |= {"step": steps, "RMS": 0.0}
    optimizer.state[parameter] = state


def state_names(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """Names of a parameter's state tensors."""
    return tuple(_shapes(optimizer, parameter))


def _shapes(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, torch.Size]:
    if isinstance(optimizer, AdamW):
        return dict.fromkeys(MOMENTS, parameter.shape)
    if isinstance(optimizer, SGD):
        return {"momentum_buffer": parameter.shape} if optimizer.defaults["momentum"] else {}
    if parameter.dim() < 2:
        return {"exp_avg_sq": parameter.shape}
    shape = parameter.shape
    return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}


def hold(optimizer: Optimizer, parameter: nn.Parameter, held: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What `release` needs to undo a step where `held` (`[O, D]` or broadcast to it) is true: (tensor, mask, value).

    Adafactor's factored state is of whole rows and columns, and moves.
    """
    same = [value for value in state_of(optimizer, parameter).values() if value.shape == parameter.shape]
    return [(tensor, held, tensor.detach().clone()) for tensor in (parameter, *same)]


@torch.no_grad()
def release(kept: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Undo a step where it must not have moved anything."""
    for tensor, held, old in kept:
        tensor.copy_(torch.where(held, old, tensor))
