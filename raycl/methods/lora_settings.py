"""The settings of a LoRA and how its weights are drawn, for every method that has one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BeforeValidator, Field, PositiveFloat, model_validator
from torch import Tensor, nn

from raycl.adapters import AdapterStack
from raycl.adapters.experts import expert_names, parameter_of
from raycl.adapters.stack import Init, Sizes, Start
from raycl.backbone.roles import linear_names, matching
from raycl.config import Section
from raycl.config.sections import Size
from raycl.errors import BackboneError

ValueT = TypeVar("ValueT")


def as_tuple(value: Any) -> Any:
    """Return a single text as a list of one; anything else as it is."""
    return (value,) if isinstance(value, str) else value


_Targets = Annotated[
    tuple[str, ...],
    BeforeValidator(as_tuple),
    Field(
        description="linears with an adapter: all-linear (all but the head), or roles or regular expressions of paths"
    ),
]
TargetModules = Annotated[_Targets, Field(min_length=1)]
Rank = Annotated[int, Field(ge=1, description="the rank of the update")]
LoraAlpha = Annotated[float, Field(gt=0, description="the update is scaled by lora_alpha / r")]
InputDropout = Annotated[
    float, Field(ge=0, lt=1, description="share of the adapter's inputs that is dropped in training")
]

BY_LINEAR = ("use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights=gaussian", "target_parameters")
"""The settings of methods that begin training by `LoraSettings.begin_training` and need no two linears of one rank."""

OPTIONS = (
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "use_dora",
    "modules_to_save",
    "target_parameters",
)
"""The settings that a method must say that it takes."""


UNSUPPORTED = {
    "layers_to_transform": "name the layers in target_modules, such as 'layers\\.(0|1)\\..*q_proj'",
    "exclude_modules": "name the linears in target_modules",
    "bias": "an adapter holds no biases",
    "lora_bias": "an adapter holds no biases",
}
"""Settings of PEFT that no method takes -> why, or what to do."""


class LoraSettings(Section):
    """The settings of every LoRA, by the names that PEFT's `LoraConfig` has for them."""

    r: Rank = 8
    lora_alpha: LoraAlpha = 32.0
    lora_dropout: InputDropout = 0.0
    target_modules: _Targets = ("attention.query", "attention.value")
    target_parameters: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (),
        description="paths, or ends of paths, of parameters that the experts of a mixture-of-experts block share, such "
        "as experts.down_proj; each expert has an update of its own of rank r",
    )
    use_rslora: bool = Field(False, description="the update is scaled by lora_alpha / sqrt(r) (rsLoRA)")
    rank_pattern: dict[str, Size] = Field(
        default_factory=dict,
        description="linears, as in target_modules -> r, where it differs; of several that match the first counts",
    )
    alpha_pattern: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="linears, as in rank_pattern -> lora_alpha, where it differs"
    )
    init_lora_weights: Literal[True, "gaussian", "pissa", "olora"] = Field(
        True,
        description="how A and B begin. true: A Kaiming-uniform, B zero; gaussian: A with deviation 1 / r, B zero; "
        "pissa, olora: from the singular values, or the QR decomposition, of the weight, with the start subtracted "
        "from the update, so that the adapter has rank 2 r",
    )
    use_dora: bool = Field(
        False, description="train the norms of the rows of adapted weights too (DoRA); the adapter is used alone"
    )
    modules_to_save: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (),
        description="paths, or ends of paths, of embeddings and linears of which the adapter trains a copy of its own, "
        "such as lm_head; the adapter is used alone",
    )

    takes: ClassVar[tuple[str, ...]] = ("use_rslora",)
    """Those of `OPTIONS` that the method takes; of a choice, `NAME=VALUE`."""

    @model_validator(mode="before")
    @classmethod
    def _are_supported(cls, tree: Any) -> Any:
        for name, why in UNSUPPORTED.items():
            if isinstance(tree, dict) and name in tree:
                raise ValueError(f"{name} is not supported: {why}")
        return tree

    @model_validator(mode="after")
    def _are_taken(self) -> LoraSettings:
        for name in OPTIONS:
            value = getattr(self, name)
            if not value or value is True is type(self).model_fields[name].default:
                continue
            written = f"{name}={value}" if isinstance(value, str) else name
            if written not in self.takes:
                raise ValueError(
                    f"{written} is not supported by this method: expected some of {', '.join(self.takes)}, or a method "
                    "that supports it (docs/guides/runs.md lists them)"
                )
        if self.use_dora and self.init_lora_weights in STARTS:
            raise ValueError(
                f"use_dora and init_lora_weights={self.init_lora_weights} are not supported together: expected one"
            )
        if not self.target_modules and not self.target_parameters:
            raise ValueError("target_modules is empty: expected one linear or more, or target_parameters beside it")
        if self.use_dora and self.target_parameters:
            raise ValueError("use_dora and target_parameters are not supported together: expected one")
        return self

    @property
    def scaling(self) -> float:
        """The scale of the update."""
        return self.scale_of(self.r)

    @property
    def reads_weights(self) -> bool:
        return self.reads_chosen_weights

    @property
    def reads_chosen_weights(self) -> bool:
        """Return whether settings have weights read: for the norms of DoRA's rows, a start, a copy or experts."""
        return self.use_dora or bool(self.modules_to_save or self.target_parameters) or self.init_lora_weights in STARTS

    def adapted(self, model: nn.Module) -> list[str]:
        """Return the paths of the linears with an adapter, those of experts last.

        Raises:
            BackboneError: a target names nothing.
        """
        return linear_names(model, self.target_modules) + expert_names(model, self.target_parameters)

    def scale_of(self, rank: int, alpha: float | None = None) -> float:
        """Return the scale of an update of this rank.

        Args:
            alpha: its own alpha; None: `lora_alpha`.
        """
        return (alpha or self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def begin_training(self, stack: AdapterStack, names: Sequence[str], rank: int | None = None) -> None:
        """Begin to train adapters in a stack.

        Args:
            rank: rank of each, where `rank_pattern` has no other; None: `r`.

        Raises:
            BackboneError: a pattern matches no adapted linear, a weight has fewer singular values than `r`, or a module
                cannot be copied.
        """
        rank = rank or self.r
        stack.begin_training(
            dict.fromkeys(names, rank),
            self.scale_of(rank),
            partial(as_peft_draws, fill=gaussian if self.init_lora_weights == "gaussian" else kaiming),
            self.lora_dropout,
            self._sizes(list(stack.layers), rank),
            STARTS.get(self.init_lora_weights),
            self.use_dora,
            copied_modules(stack.model, self.modules_to_save),
        )

    def _sizes(self, paths: Sequence[str], rank: int) -> Sizes:
        """Return rank and scale of the linears that a pattern names; experts by the parameter that they share."""
        named = list(dict.fromkeys(map(parameter_of, paths)))
        ranks, alphas = _matched(self.rank_pattern, named), _matched(self.alpha_pattern, named)
        own = {name: (ranks.get(name, rank), alphas.get(name)) for name in (*ranks, *alphas)}
        sizes = {name: (size, self.scale_of(size, alpha)) for name, (size, alpha) in own.items()}
        return {path: sizes[name] for path in paths if (name := parameter_of(path)) in sizes}


def copied_modules(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the paths of the embeddings and linears with these ends.

    Raises:
        BackboneError: there is none, it has a bias or an adapter, or the model uses it at several places.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = []
    for name in names:
        found = [path for path, module in modules.items() if f".{path}".endswith(f".{name}")]
        for path in found:
            module = modules[path]
            is_plain = isinstance(module, nn.Embedding | nn.Linear) and [n for n, _ in module.named_parameters()] == [
                "weight"
            ]
            if not is_plain or sum(other is module for other in modules.values()) > 1:
                raise BackboneError(
                    f"modules_to_save: '{path}' is a {type(module).__name__}: expected an embedding or a linear "
                    "without bias, without an adapter, and used at one place of the model"
                )
        if not found:
            kinds = [path for path, module in modules.items() if isinstance(module, nn.Embedding)]
            raise BackboneError(
                f"modules_to_save: no module is called '{name}': expected lm_head, {', '.join(kinds)}, ..."
            )
        chosen += found
    return list(dict.fromkeys(chosen))


def _matched(pattern: Mapping[str, ValueT], paths: Sequence[str]) -> dict[str, ValueT]:
    """Return the path -> the value of the first key that selects it."""
    keys = reversed(list(pattern))
    return {path: pattern[key] for key in keys for path in matching(paths, [key])}


def as_peft_draws(low: Tensor, outputs: int, fill: Init | None = None) -> None:
    """Draw A by `fill`, or Kaiming-uniform. PEFT first draws values for A and B that it throws away: so do we, to start
    as it does."""
    rank, inputs = low.shape
    nn.Linear(inputs, rank, bias=False)
    nn.Linear(rank, outputs, bias=False)
    (fill or kaiming)(low, outputs)


def kaiming(low: Tensor, outputs: int) -> None:
    """Fill A as torch draws linears."""
    nn.init.kaiming_uniform_(low, a=math.sqrt(5))


def gaussian(low: Tensor, outputs: int) -> None:
    """Fill A with a standard deviation of 1 / r."""
    nn.init.normal_(low, std=1 / len(low))


def pissa(weight_OD: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return A and B of the largest singular values, whose update is that part of the weight (Meng et al. 2024, section
    3)."""
    left_OK, values_K, right_KD = torch.linalg.svd(weight_OD, full_matrices=False)
    _check_rank(rank, len(values_K), "pissa")
    roots_r = (values_K[:rank] / scale).sqrt()
    return roots_r[:, None] * right_KD[:rank], left_OK[:, :rank] * roots_r


def olora(weight_OD: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return A and B of the QR decomposition of the weight, B orthonormal (Büyükakyüz 2024; unrelated to the method
    `olora`)."""
    q_OK, r_KD = torch.linalg.qr(weight_OD)
    _check_rank(rank, len(r_KD), "olora")
    return r_KD[:rank], q_OK[:, :rank]


def _check_rank(rank: int, most: int, start: str) -> None:
    if rank > most:
        raise BackboneError(f"init_lora_weights={start} has r={rank} on a weight of rank {most}: expected r up to that")


STARTS: Mapping[Any, Start] = {"pissa": pissa, "olora": olora}
"""Values of `init_lora_weights` that begin with a part of the weight."""
