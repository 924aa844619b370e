"""Trained parameters as an optimizer has them: in groups, with their state, at a learning rate that changes by step."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from raycl.backbone import Backbone
from raycl.training.optimizers.base import Group, OptimizerKind, ParameterSpec
from raycl.training.optimizers.settings import DECAYS, TrainConfig


def specs_of(backbone: Backbone, train: TrainConfig, rates: Mapping[str, float]) -> dict[str, ParameterSpec]:
    """Return the parameters of the backbone that are trained now, by name.

    Args:
        rates: name of a parameter, or what it begins with -> its own learning rate.
    """
    head, unlike_matrices = _ids(backbone.head), _unlike_matrices(backbone)
    decays_all = not train.weight_decay or train.decay_norms_and_biases
    specs = {}
    for name, parameter in backbone.named_parameters():
        if parameter.requires_grad:
            own_rates = [rate for start, rate in rates.items() if name.startswith(start)]
            specs[name] = ParameterSpec(
                shape=parameter.shape,
                is_matrix=parameter.dim() == 2 and id(parameter) not in unlike_matrices,
                decays=decays_all or not is_norm_or_bias(name, backbone),
                learning_rate=train.head_learning_rate if id(parameter) in head else next(iter(own_rates), None),
            )
    return specs


def is_norm_or_bias(name: str, backbone: Backbone) -> bool:
    """Return whether weight decay leaves it out, as in the Hugging Face trainer, and T5's biases of positions."""
    owner = backbone.get_submodule(name.rpartition(".")[0])
    is_norm = "norm" in f"{name} {type(owner).__name__}".lower() and backbone.get_parameter(name).dim() < 2
    return is_norm or "bias" in name.lower()


def groups_of(
    parameters: Mapping[str, nn.Parameter], specs: Mapping[str, ParameterSpec], separates_matrices: bool = False
) -> list[Group]:
    """Return parameters with the same rate and decay together; those at `train.learning_rate` are first.

    Args:
        parameters: the updated part of each, by name. separates_matrices: see `OptimizerKind`.
    """
    groups: dict[tuple[bool, float, bool, bool], Group] = {}
    for name, parameter in parameters.items():
        spec = specs[name]
        is_matrix = separates_matrices and spec.is_matrix
        rate = spec.learning_rate
        group = groups.setdefault((rate is not None, rate or 0.0, not spec.decays, not is_matrix), {"params": []})
        group["params"].append(parameter)
        if rate is not None:
            group["lr"] = rate
        if not spec.decays:
            group["weight_decay"] = 0.0
        if separates_matrices:
            group["is_matrix"] = is_matrix
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], key[2:]))]


def state_of(
    kind: OptimizerKind, optimizer: Optimizer, parameter: nn.Parameter, spec: ParameterSpec
) -> dict[str, Tensor]:
    """Return state tensors of a parameter by name; zeros before the first step."""
    state = optimizer.state.get(parameter, {})
    return {
        name: state[name]
        if isinstance(state.get(name), Tensor)
        else torch.zeros(tensor.shape, dtype=tensor.dtype, device=parameter.device)
        for name, tensor in kind.state(spec).items()
    }


def state_bytes(kind: OptimizerKind, parameters: Iterable[ParameterSpec]) -> int:
    """Return what the optimizer keeps for these parameters."""
    return sum(tensor.nbytes for spec in parameters for tensor in kind.state(spec).values())


def hold(parameter: Tensor, state: Mapping[str, Tensor], held: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return what `release` needs to undo a step where `held` (`[O, D]` or broadcast to it) is true: (tensor, mask,
    value), of the parameter and its state.

    State that is not of single values, such as Adafactor's of whole rows and columns, or codes that share a scale,
    moves.
    """
    same = [value for value in state.values() if value.shape == parameter.shape and value.is_floating_point()]
    return [(tensor, held, tensor.detach().clone()) for tensor in (parameter, *same)]


@torch.no_grad()
def release(kept: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Undo a step where it must not have moved anything."""
    for tensor, held, old in kept:
        tensor.copy_(torch.where(held, old, tensor))


def schedule(optimizer: Optimizer, train: TrainConfig, steps: int) -> LambdaLR:
    warmup, decay = train.warmup(steps), DECAYS[train.lr_scheduler]

    def factor(step: int) -> float:
        return step / warmup if step < warmup else decay(step - warmup, steps - warmup, train.learning_rate)

    return LambdaLR(optimizer, factor)


def advance(scheduler: LambdaLR, steps: int) -> None:
    """Put a fresh schedule where it would be after `steps` steps."""
    state = scheduler.state_dict()
    rates = [base * rate(steps) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict({**state, "last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _unlike_matrices(backbone: Backbone) -> set[int]:
    """Return ids of parameters that are tables of vectors: embeddings, output words, soft prompts, label heads."""
    words = backbone.model.get_output_embeddings()
    tables = [module for module in backbone.modules() if isinstance(module, nn.Embedding)]
    return set().union(*map(_ids, (*tables, words, backbone.head, backbone.prefix, backbone.suffix)))


def _ids(module: object) -> set[int]:
    return {id(parameter) for parameter in module.parameters()} if isinstance(module, nn.Module) else set()
