"""A linear layer that adds, for each example, its own mixture of low-rank updates.

What it does not know: which mixture is active (its stack does), which adapters exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from raycl.adapters.formula import OWN_TOKENS, add_own, add_shared

if TYPE_CHECKING:
    from raycl.adapters.stack import AdapterStack


class StackedLora(nn.Module):
    """`base(x)` plus the active mixture, as `formula` adds it.

    Attributes:
        base: the linear it stands for (`nn.Linear`, or Hugging Face's `Conv1D`), untouched.
        lora_A: `[R, D]` rows of the adapters in training; None between tasks.
        lora_B: `[O, R]` their outputs, in PEFT's layout.
        low_observer: called with `A x` `[..., R]` of the adapters in training, before activation, and gates `[B, R]`.
    """

    def __init__(self, base: nn.Module, stack: AdapterStack, path: str) -> None:
        super().__init__()
        self.base = base
        self.path = path
        self.inputs, self.outputs = linear_shape(base)
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        self.lora_A: nn.Parameter | None
        self.lora_B: nn.Parameter | None
        self.low_observer: Callable[[Tensor, Tensor], None] | None = None
        self._stack = stack

    @property
    def trainable_ranks(self) -> tuple[int, ...]:
        """Rank of each adapter in training, in the order of their rows."""
        return tuple(self._stack.trainable.values()) if self.lora_A is not None else ()

    @property
    def trainable_scale(self) -> float:
        """Of every adapter in training."""
        return self._stack.trainable_scale

    @property
    def weight(self) -> Tensor:
        """The base's own weight: some models look at a linear's dtype or device."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The base's own bias."""
        return self.base.bias  # type: ignore[return-value]

    def trainable(self) -> tuple[Tensor, Tensor]:
        """A and B in training with their gradients, whole even where the engine keeps parts (ZeRO 3)."""
        assert self.lora_A is not None and self.lora_B is not None, "no adapter is in training"
        if self.lora_A.numel() and self.lora_B.numel():
            return self.lora_A, self.lora_B
        pair: tuple[Tensor, Tensor] = self(None)  # for a forward pass, and its backward, engines gather
        return pair

    def forward(self, x: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """`[..., D]` to `[..., O]`; the first axis is the example (times beams or samples); None: see `trainable`."""
        if x is None:
            assert self.lora_A is not None and self.lora_B is not None
            return self.lora_A.clone(), self.lora_B.clone()
        y: Tensor = self.base(x)
        stack = self._stack
        if stack.static is not None:
            a_RD, b_RO = stack.static.layer(self.path)
            return add_shared(y, x, a_RD, b_RO, stack.static.gate, stack.activation)
        plan = stack.plan
        if plan is None:
            return y
        rows = x.shape[0]
        seen = x.detach() if stack.detach_loaded else x
        if plan.own is not None and x.dim() == 3 and x.shape[1] >= OWN_TOKENS:
            a_BKD, b_BKO = plan.own_rows(self.path, rows)
            y = add_own(y, seen, a_BKD, b_BKO, plan.own_gate(rows), stack.activation)
        elif plan.has_loaded:
            a_RD, b_RO = plan.shared_rows(self.path)
            y = add_shared(y, seen, a_RD, b_RO, plan.shared_gate(rows), stack.activation)
        if plan.trainable_gate is not None and self.lora_A is not None:
            y = self._add_trainable(y, x, plan.trainable_gate_for(rows))
        return y

    def _add_trainable(self, y: Tensor, x: Tensor, gate_BR: Tensor) -> Tensor:
        """The part in training: exact gradients to A, B, the gate and x."""
        assert self.lora_A is not None and self.lora_B is not None
        h = linear(dropout(x, self._stack.dropout, self.training), self.lora_A)
        if self.low_observer is not None:
            self.low_observer(h, gate_BR)
        if self._stack.activation == "relu":
            h.relu_()
        gate = gate_BR.to(h.dtype).view(gate_BR.shape[0], *(1,) * (x.dim() - 2), -1)
        return y + linear(h * gate, self.lora_B)


def linear_shape(base: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear; Conv1D keeps its weight the other way round."""
    if isinstance(base, nn.Linear):
        return base.in_features, base.out_features
    inputs, outputs = base.weight.shape  # type: ignore[misc]
    return int(inputs), int(outputs)


def base_dtype(base: nn.Module) -> torch.dtype:
    """What the linear computes in."""
    return base.weight.dtype  # type: ignore[return-value]
