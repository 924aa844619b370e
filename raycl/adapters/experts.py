"""Experts of a mixture-of-experts block whose weights are slices of one parameter, as in Transformers 5.

To adapters each expert is a linear of its own, called `<path of the parameter>[<number>]`, such as
`model.layers.0.mlp.experts.down_proj[3]`: it has A and B, is published, mixed and exported as any other linear. PEFT
selects these parameters by `target_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from raycl.adapters.layer import GatheredPositions
from raycl.errors import BackboneError

if TYPE_CHECKING:
    from raycl.adapters.stack import AdapterStack

PATH = re.compile(r"(?P<parameter>(?P<module>.+)\.(?P<name>\w+))\[(?P<number>\d+)\]")
"""The path of an expert's linear."""

NAMES = ("gate_up_proj", "up_proj", "down_proj")
"""Fused parameters, in the order in which experts compute and register them."""


@dataclass(frozen=True)
class FusedParameter:
    """A parameter of all experts of a block.

    Attributes:
        module: path of the experts. name: its name there. experts: number of experts.
        inputs, outputs: of each expert's linear.
    """

    module: str
    name: str
    experts: int
    inputs: int
    outputs: int

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def linears(self) -> list[str]:
        return [f"{self.path}[{number}]" for number in range(self.experts)]


def parameter_of(path: str) -> str:
    """Return the path of the parameter that an expert's linear is a slice of; another path as it is."""
    match = PATH.fullmatch(path)
    return match["parameter"] if match else path


def fused_parameters(model: nn.Module) -> list[FusedParameter]:
    """Return the fused parameters of a model: of those experts for which Transformers has several implementations."""
    found = []
    for path, module in model.named_modules():
        experts: Any = module
        if hasattr(experts, "has_gate") and hasattr(experts, "is_transposed"):
            shapes = {name: value.shape for name, value in experts.named_parameters(recurse=False) if name in NAMES}
            for name in (name for name in NAMES if name in shapes):
                number, rows, columns = shapes[name]
                sides = (rows, columns) if experts.is_transposed else (columns, rows)
                found.append(FusedParameter(path, name, number, *sides))
    return found


def expert_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the path of each expert's linear -> inputs and outputs."""
    return {path: (fused.inputs, fused.outputs) for fused in fused_parameters(model) for path in fused.linears}


def expert_names(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the paths of the experts' linears whose parameters `targets` name.

    Args:
        targets: paths of fused parameters, or ends of paths, as PEFT's `target_parameters`.

    Raises:
        BackboneError: a target names no fused parameter.
    """
    known = fused_parameters(model)
    for target in targets:
        if not any(ends_in(fused.path, target) for fused in known):
            kinds = sorted({re.sub(r"\.\d+\.", ".*.", fused.path) for fused in known})
            raise BackboneError(
                f"target_parameters: '{target}' names no parameter that experts share: expected the end of one of "
                f"{', '.join(kinds)}"
                if kinds
                else f"target_parameters: '{target}' names no parameter that experts share, and {type(model).__name__} "
                "has none: name linears in target_modules"
            )
    chosen = [fused for fused in known if any(ends_in(fused.path, target) for target in targets)]
    return [path for fused in chosen for path in fused.linears]


def ends_in(path: str, name: str) -> bool:
    """Return whether a name is a path, or its end."""
    return f".{path}".endswith(f".{name}")


class ExpertLinear(nn.Module):
    """The linear of one expert; it looks like Hugging Face's `Conv1D`."""

    def __init__(self, experts: nn.Module, name: str, number: int) -> None:
        super().__init__()
        experts.get_parameter(name)
        self._of = (experts, name, number)  # in a tuple, so that it is no child

    @property
    def weight(self) -> Tensor:
        """Its part of the parameter, `[D, O]`."""
        experts: Any
        experts, name, number = self._of
        weight: Tensor = getattr(experts, name)[number]
        return weight if experts.is_transposed else weight.T

    @property
    def bias(self) -> Tensor | None:
        """Its bias `[O]`."""
        experts: Any
        experts, name, number = self._of
        return getattr(experts, f"{name}_bias")[number] if experts.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return `[S, D]` to `[S, O]`."""
        return linear(x, self.weight.T, self.bias)


class StackedExperts(nn.Module):
    """The experts of a block, of which each linear is a child `<name>[<number>]` that a `StackedLora` can replace.

    Attributes:
        base: the experts that it replaces, unchanged. rows: rows of the batch that the block sees.
    """

    def __init__(self, base: nn.Module, stack: AdapterStack) -> None:
        super().__init__()
        self.base = base
        self.rows = 1
        self._stack = stack
        for fused in fused_parameters(base):
            for number in range(fused.experts):
                self.add_module(f"{fused.name}[{number}]", ExpertLinear(base, fused.name, number))

    def count_rows(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Keep the number of rows, because experts see positions alone; this is a forward pre-hook of the block."""
        self.rows = len(args[0])

    def forward(self, hidden_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each position's experts.

        Args:
            hidden_ND: the positions of all rows. chosen_NK: numbers of experts. weights_NK: their weights.
        """
        if self._stack.plan is None:
            plain: Tensor = self.base(hidden_ND, chosen_NK, weights_NK)
            return plain
        experts: Any = self.base
        order_S = chosen_NK.flatten().argsort(stable=True)  # each position is there once for each of its experts
        counts = torch.bincount(chosen_NK.flatten(), minlength=experts.num_experts).tolist()
        index_S = order_S // chosen_NK.shape[1]
        at = [
            GatheredPositions(self.rows, len(hidden_ND) // self.rows, index) for index in torch.split(index_S, counts)
        ]
        y = self._project("gate_up_proj" if experts.has_gate else "up_proj", hidden_ND[index_S], at)
        y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
        y = self._project("down_proj", y, at)
        if getattr(experts, "has_post_expert_norm", False):  # transformers 5.15 has no such experts
            y = experts.post_expert_norm(y)
        y = (y * weights_NK.flatten()[order_S, None])[order_S.argsort()]
        return y.view(*chosen_NK.shape, -1).sum(1).to(hidden_ND.dtype)

    def _project(self, name: str, x_SD: Tensor, at: Sequence[GatheredPositions]) -> Tensor:
        """Return the outputs of one linear of each expert, whose inputs follow one another.

        In training, experts without a position are computed too, because engines wait for each gradient.
        """
        trains = torch.is_grad_enabled() and bool(self._stack.trainable)
        outputs = []
        parts = torch.split(x_SD, [len(positions.index_S) for positions in at])
        for number, (part, positions) in enumerate(zip(parts, at, strict=True)):
            if len(part) or trains:
                layer = self.get_submodule(f"{name}[{number}]")
                outputs.append(layer(part) if isinstance(layer, ExpertLinear) else layer(part, positions))
        return torch.cat(outputs)


def linear_at(model: nn.Module, path: str) -> nn.Module:
    """Return the linear at a path, or what has taken its place.

    Raises:
        AttributeError: there is none.
    """
    match = PATH.fullmatch(path)
    if match is None:
        return model.get_submodule(path)
    experts = model.get_submodule(match["module"])
    if isinstance(experts, StackedExperts):
        return model.get_submodule(path)
    return ExpertLinear(experts, match["name"], int(match["number"]))
