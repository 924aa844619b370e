"""A linear layer that adds, for each example, its own mixture of low-rank updates.

In a stack of prefixes it is an attention's output projection and adds, for each example, attention to its prefixes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout, linear

from raycl.adapters.formula import OWN_TOKENS, SelfActivation, add_own, add_shared, attend, spread

if TYPE_CHECKING:
    from raycl.adapters.stack import AdapterStack


@dataclass
class AttentionQueries:
    """The last output of an attention layer's query projection, for its output projection.

    Attributes:
        heads: number of heads. scaling: factor of the scores.
    """

    heads: int
    scaling: float
    last: Tensor | None = None

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> None:
        """Keep the output; this is a forward hook of the query projection."""
        self.last = output

    def take(self) -> Tensor:
        """Return `[B, T, D]` and forget it."""
        assert self.last is not None, "the layer's queries were not computed"
        last, self.last = self.last, None
        return last


@dataclass(frozen=True)
class TrainedUpdate:
    """The update of one linear by the adapters in training.

    Attributes:
        ranks: rank of each adapter, in the order of their rows.
        scale: the scale of the update. factor: the same, divided by the scale in the stack's gate.
        columns: `[R]` column of the stack's gate of each row; None: they are the same.
        start: A `[R, D]` and B `[O, R]` that training begins with, whose product is subtracted, so that the initial
            update is zero; None: B begins at zero.
    """

    ranks: tuple[int, ...] = ()
    scale: float = 1.0
    factor: float = 1.0
    columns: Tensor | None = None
    start: tuple[Tensor, Tensor] | None = None

    def gate(self, gate_BR: Tensor) -> Tensor:
        """Return the gate of its rows, of the stack's gate of each example or position."""
        own = gate_BR if self.columns is None else gate_BR[..., self.columns]
        return own if self.factor == 1 else own * self.factor

    def rows(self, number: int) -> slice:
        """Return the rows of an adapter."""
        first = sum(self.ranks[:number])
        return slice(first, first + self.ranks[number])


@dataclass(frozen=True)
class GatheredPositions:
    """The positions of a batch that a layer gets as its inputs, where these are not all positions in their order.

    Attributes:
        rows: rows of the batch. length: positions of each. index_S: numbers of the positions, counted over all rows.
    """

    rows: int
    length: int
    index_S: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Return `[S, ...]`, the values of these positions, of values of each row, or of each position of each row."""
        return values[self.index_S // self.length] if values.dim() == 2 else values.flatten(0, 1)[self.index_S]


class StackedLora(nn.Module):
    """`base(x)` plus the active mixture, as `formula` adds it.

    Attributes:
        base: the linear that it replaces (`nn.Linear`, or Hugging Face's `Conv1D`), unchanged.
        lora_A: `[R, D]` rows of the adapters in training; None between tasks.
        lora_B: `[O, R]` their outputs, in PEFT's layout.
        lora_magnitude_vector: `[O]` norms of the adapted weight's rows (DoRA); None: they follow from the weight.
        update: ranks and scale of the adapters in training.
        queries: queries of its attention layer, in a stack of prefixes.
        unit_masks: gives factors of the units `[R]` between A and B of adapters in training, and of what these add
            `[O]` (None: none); None: there are none.
        low_observer: called with `A x` `[..., R]` of the adapters in training, before activation, and gates `[B, R]`,
            or `[B, T, R]` of each position.
    """

    def __init__(self, base: nn.Module, stack: AdapterStack, path: str) -> None:
        super().__init__()
        self.base = base
        self.training = base.training
        self.path = path
        self.inputs, self._outputs = linear_shape(base)
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        self.register_parameter("lora_magnitude_vector", None)
        self.lora_A: nn.Parameter | None
        self.lora_B: nn.Parameter | None
        self.lora_magnitude_vector: nn.Parameter | None
        self.update: TrainedUpdate = TrainedUpdate()
        self.queries: AttentionQueries | None = None
        self.unit_masks: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.low_observer: Callable[[Tensor, Tensor], None] | None = None
        self._stack = stack

    @property
    def outputs(self) -> int:
        """Width of B: that of the linear's outputs, or of values, which are added to its inputs."""
        return self.inputs if self._stack.activation == "softmax" else self._outputs

    @property
    def trainable_ranks(self) -> tuple[int, ...]:
        """Rank of each adapter in training, in the order of their rows."""
        return self.update.ranks if self.lora_A is not None else ()

    @property
    def weight(self) -> Tensor:
        """The weight of the base, because some models read a linear's dtype or device."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    def trainable(self) -> tuple[Tensor, Tensor]:
        """Yield A and B in training with their gradients, complete even where the engine keeps parts (ZeRO 3)."""
        assert self.lora_A is not None and self.lora_B is not None, "no adapter is in training"
        if self.lora_A.numel() and self.lora_B.numel():
            return self.lora_A, self.lora_B
        pair: tuple[Tensor, Tensor] = self(None)  # for a forward pass, and its backward, engines gather
        return pair

    def forward(self, x: Tensor | None, at: GatheredPositions | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return `[..., D]` to `[..., O]`; the first axis is the example (times beams or samples).

        Args:
            x: None: see `trainable`.
            at: the positions of x, where it is `[S, D]`.
        """
        if x is None:
            assert self.lora_A is not None and self.lora_B is not None
            return self.lora_A.clone(), self.lora_B.clone()
        stack = self._stack
        if stack.activation == "softmax":
            return self._with_prefixes(x)
        y: Tensor = self.base(x)
        if stack.static is not None:
            assert at is None, "experts choose positions, of which a graph has no fixed number"
            a_RD, b_RO = stack.static.active.layer(self.path)
            if stack.self_activation is not None:
                h = linear(x, a_RD)
                return stack.self_activation.add(y, [(h, spread(stack.static.gate, h), b_RO.T)])
            y = add_shared(y, x, a_RD, b_RO, stack.static.gate, stack.activation)
            ratio_BO = stack.static.ratios.get(self.path)
            return y if ratio_BO is None else self._rescale(y, ratio_BO)
        plan = stack.plan
        if plan is None:
            return y
        rows = x.shape[0] if at is None else at.rows
        seen = x.detach() if stack.detach_loaded else x

        def of_inputs(values: Tensor) -> Tensor:
            values = plan.for_rows(values, rows)
            return values if at is None else at.of(values)

        if stack.self_activation is not None:
            return self._with_memory(y, x, seen, of_inputs, stack.self_activation)
        if plan.own is not None and x.dim() == 3 and x.shape[1] >= OWN_TOKENS:
            a_BKD, b_BKO = plan.own_rows(self.path, rows)
            y = add_own(y, seen, a_BKD, b_BKO, plan.for_rows(plan.own[1], rows), stack.activation)
        elif plan.gate is not None:
            a_RD, b_RO = plan.shared_rows(self.path)
            y = add_shared(y, seen, a_RD, b_RO, of_inputs(plan.gate), stack.activation)
        if plan.trainable_gate is not None and self.lora_A is not None:
            y = self._add_trainable(y, x, of_inputs(plan.trainable_gate))
        for name, weight_B1 in plan.alone.items():
            ratio_O = self._magnitude_ratio(name)
            if ratio_O is not None:
                weight_B1 = of_inputs(weight_B1)
                y = self._rescale(y, 1 + weight_B1.to(ratio_O) * (ratio_O - 1))
        return y

    def _magnitude_ratio(self, name: str) -> Tensor | None:
        """Return `[O]`, the adapter's magnitudes divided by the norms of the rows of the weight that it makes; no
        gradient flows through the norms (DoRA, section 4.3)."""
        if name not in self._stack.trainable:
            return self._stack.magnitude_ratio(name, self.path)
        if self.lora_magnitude_vector is None or self.lora_A is None or self.lora_B is None:
            return None
        pair = self.lora_A.detach(), self.lora_B.detach()
        return self.lora_magnitude_vector / adapted_norms(self.base, *pair, self.update.scale)

    def _rescale(self, y: Tensor, ratio_BO: Tensor) -> Tensor:
        """Scale each output, without its bias, by the factors of its example or position."""
        unbiased = y if self.bias is None else y - self.bias
        return y + (spread(ratio_BO, y) - 1) * unbiased

    def _with_prefixes(self, x: Tensor) -> Tensor:
        """Return `base(x + attention to the active prefixes)`, with loaded and trained prefixes in one softmax."""
        assert self.queries is not None
        q = self.queries.take()
        prefixes = self._prefixes(x.shape[0])
        if prefixes is not None:
            x = x + attend(q, *prefixes, self.queries.heads, self.queries.scaling)
        y: Tensor = self.base(x)
        return y

    def _prefixes(self, rows: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return keys, values and gates of the active prefixes; None without any."""
        plan, static = self._stack.plan, self._stack.static
        if static is not None:
            return *static.active.layer(self.path), static.gate
        if plan is None:
            return None
        parts = []
        trained = plan.trainable_gate is not None and self.lora_A is not None
        if plan.own is not None and not trained:
            return *plan.own_rows(self.path, rows), plan.for_rows(plan.own[1], rows)
        if plan.gate is not None:
            parts.append((*plan.shared_rows(self.path), plan.for_rows(plan.gate, rows)))
        if plan.trainable_gate is not None and self.lora_A is not None and self.lora_B is not None:
            trainable = plan.for_rows(plan.trainable_gate, rows)
            parts.append((self.lora_A, self.lora_B.T, self.update.gate(trainable)))
        if len(parts) < 2:
            return parts[0] if parts else None
        keys, values, gates = zip(*parts, strict=True)
        return torch.cat(keys), torch.cat(values), torch.cat(gates, dim=-1)

    def _with_memory(
        self, y: Tensor, x: Tensor, seen: Tensor, of_inputs: Callable[[Tensor], Tensor], memory: SelfActivation
    ) -> Tensor:
        """Return y with loaded rows and those in training as one memory, with exact gradients to A, B, the gate and x.

        Args:
            seen: what loaded rows read.
        """
        plan, parts = self._stack.plan, []
        assert plan is not None, "no mixture is active"
        if plan.gate is not None:
            a_RD, b_RO = plan.shared_rows(self.path)
            h = linear(seen, a_RD)
            parts.append((h, spread(of_inputs(plan.gate), h), b_RO.T))
        if plan.trainable_gate is not None and self.lora_A is not None and self.lora_B is not None:
            h = linear(dropout(x, self._stack.dropout, self.training), self.lora_A)
            gate = self.update.gate(of_inputs(plan.trainable_gate))
            if self.low_observer is not None:
                self.low_observer(h, gate)
            parts.append((h, spread(gate, h), self.lora_B))
        return memory.add(y, parts, self.training) if parts else y

    def _add_trainable(self, y: Tensor, x: Tensor, gate_BR: Tensor) -> Tensor:
        """Add the adapters in training, with exact gradients to A, B, the gate and x."""
        assert self.lora_A is not None and self.lora_B is not None
        gate_BR = self.update.gate(gate_BR)
        h = linear(dropout(x, self._stack.dropout, self.training), self.lora_A)
        if self.low_observer is not None:
            self.low_observer(h, gate_BR)
        if self._stack.activation == "relu":
            h.relu_()
        gate = spread(gate_BR, h)
        if self.update.start is not None:
            a_RD, b_OR = self.update.start
            y = y - linear(linear(x, a_RD) * gate, b_OR)
        h = h * gate
        if self.unit_masks is None:
            return y + linear(h, self.lora_B)
        units_R, outputs_O = self.unit_masks()
        added = linear(h * units_R.to(h.dtype), self.lora_B)
        return y + added * outputs_O.to(added.dtype)


def linear_shape(base: nn.Module) -> tuple[int, int]:
    """Return inputs and outputs of a linear; Conv1D keeps its weight the other way round."""
    if isinstance(base, nn.Linear):
        return base.in_features, base.out_features
    inputs, outputs = base.weight.shape  # type: ignore[misc]
    return int(inputs), int(outputs)


@torch.no_grad()
def plain_weight(base: Any) -> Tensor:
    """Return the weight `[O, D]` in float32, however it is stored; for a quantized linear, the dequantized weight."""
    weight: Tensor = base.weight.detach()
    if weight.is_floating_point():
        return weight.float() if isinstance(base, nn.Linear) else weight.float().T
    one_DD = torch.eye(base.in_features, dtype=base_dtype(base), device=weight.device)
    found_DO: Tensor = base(one_DD).float() - (0 if base.bias is None else base.bias.detach().float())
    return found_DO.T


@torch.no_grad()
def adapted_norms(base: nn.Module, a_RD: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """Return `[O]`, the norms of the rows of `W + scale * B A`, in float32 on the device of W."""
    weight_OD = plain_weight(base)
    delta_OD = scale * (b_OR.to(weight_OD) @ a_RD.to(weight_OD))
    norms_O: Tensor = torch.linalg.vector_norm(weight_OD + delta_OD, dim=1)
    return norms_O


def base_dtype(base: nn.Module) -> torch.dtype:
    """Return the dtype in which the linear computes; quantized weights are stored as integers."""
    stored: torch.dtype = base.weight.dtype  # type: ignore[assignment]
    return stored if stored.is_floating_point else base.compute_dtype  # type: ignore[return-value]


class CopiedModule(nn.Module):
    """`base(x)`, with another weight for each example whose adapter has a copy.

    Attributes:
        base: the module that it replaces, unchanged.
        lora_copy: the weight in training; None: there is none.
    """

    def __init__(self, base: nn.Module, stack: AdapterStack, path: str) -> None:
        super().__init__()
        self.base = base
        self.path = path
        self.register_parameter("lora_copy", None)
        self.lora_copy: nn.Parameter | None
        self._stack = stack

    @property
    def weight(self) -> Tensor:
        """The weight of the base, because models read its dtype or device."""
        return self.base.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """Return what the base returns; the first axis is the example (times beams or samples)."""
        plan, static = self._stack.plan, self._stack.static
        if static is not None:
            alone = static.alone
        elif plan is not None:
            alone = {name: plan.for_rows(weight, len(x)) for name, weight in plan.alone.items()}
        else:
            alone = {}
        own = {name: copy for name in alone if (copy := self._copy(name)) is not None}
        if static is None and plan is not None and own.keys() & plan.everywhere:
            return self._with(next(iter(own.values())), x)
        y: Tensor = self.base(x)
        for name, copy in own.items():
            y = torch.where(spread(alone[name], y) != 0, self._with(copy, x), y)
        return y

    def _copy(self, name: str) -> Tensor | None:
        return self.lora_copy if name in self._stack.trainable else self._stack.loaded_copy(name, self.path)

    def _with(self, weight: Tensor, x: Tensor) -> Tensor:
        result: Tensor = functional_call(self.base, {"weight": weight}, (x,))
        return result
