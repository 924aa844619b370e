"""Specifications of trained parameters for an optimizer, and the groups that they form."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from raycl.backbone import Backbone
from raycl.training.optimizers.base import Group, ParameterSpec
from raycl.training.optimizers.settings import TrainConfig


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
    """Return whether weight decay leaves a parameter out, as the Hugging Face trainer does; T5's biases of positions
    too."""
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


def _unlike_matrices(backbone: Backbone) -> set[int]:
    """Return ids of parameters that are tables of vectors: embeddings, output words, soft prompts, label heads."""
    words = backbone.model.get_output_embeddings()
    tables = [module for module in backbone.modules() if isinstance(module, nn.Embedding)]
    return set().union(*map(_ids, (*tables, words, backbone.head, backbone.prefix, backbone.suffix)))


def _ids(module: object) -> set[int]:
    return {id(parameter) for parameter in module.parameters()} if isinstance(module, nn.Module) else set()
