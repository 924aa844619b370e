"""An embedding or a linear of which adapters have copies of their own (PEFT's `modules_to_save`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raycl.adapters.formula import spread

if TYPE_CHECKING:
    from raycl.adapters.stack import AdapterStack


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
            alone = {name: plan.for_rows(f"alone {name}", weight, len(x)) for name, weight in plan.alone.items()}
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
