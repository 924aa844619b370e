"""Check that the optimizer used the gradients that modifiers returned, on the real model, engine and data.

Some engines copy gradients before they can be edited (DeepSpeed 0.14.2 at ZeRO 0 in bfloat16, which the authors of MIGU
pinned; 0.19.8 at ZeRO 1 in bfloat16 with float32 accumulation), and then a mask does nothing, silently. The running
average of gradients (Adam's first moment) shows it: where the gradient was zero it has only decayed, whatever the
learning rate, weight decay, clipping or precision. It is read around the first steps of every task, until one has a
gradient, and nothing is changed: a trial step beforehand would have to put weights, moments, schedule and partitions
back under five engines, and would prove less, since it is not the step that counts.
"""

import torch
from torch import Tensor

from raycl.errors import RunError
from raycl.methods.modifier import Modifiers
from raycl.training.engines.engine import Engine

TOLERANCE = 1e-5
"""Share of the decayed moment's largest entry; exactly 0 where it was zero before, as at the start of every task."""

STEPS = 20
"""Steps that are checked until one proves it; below a new label head, and for LoRA's A, gradients are 0 at first."""


class GradientMaskCheck:
    """First moments of a few parameters around a step. Collective: every worker looks at the same ones.

    Attributes:
        steps_left: steps that may still be checked; 0 if the check has passed, or there is nothing to check.
    """

    def __init__(self, engine: Engine, modifiers: Modifiers, moment: tuple[str, float] | None) -> None:
        """Create the check of one task's engine.

        Args:
            moment: name and decay rate of the optimizer's running average of gradients; None: it has none, and nothing
                is checked.
        """
        self.engine = engine
        self.modifiers = modifiers
        self.moment, self.decay = moment or ("", 0.0)
        self.names: list[str] = _sampled_names(modifiers.parameter_names) if moment else []
        self.steps_left = STEPS if self.names else 0
        self._before: dict[str, Tensor] = {}

    def before_step(self) -> None:
        """Read the moments."""
        if self.steps_left:
            self._before = self.engine.optimizer_state(self.names)

    def after_step(self) -> None:
        """Compare moments with the mask.

        Raises:
            RunError: the optimizer saw a gradient where there should be none.
        """
        if not self.steps_left:
            return
        after = self.engine.optimizer_state(self.names)
        masked = [name for name in self.names if self.modifiers.masked(name) is not None]
        conclusive = [
            self._is_conclusive(name, *(state[f"{name}/{self.moment}"] for state in (self._before, after)))
            for name in masked
        ]
        self.steps_left = 0 if any(conclusive) or not masked else self.steps_left - 1

    def _is_conclusive(self, name: str, before: Tensor, after: Tensor) -> bool:
        """Return whether there was a gradient at all, so that its absence in the masked rows proves something."""
        masked, held = self.modifiers.masked(name), self.modifiers.held(name)
        assert masked is not None
        expected = before * self.decay
        if held is not None:
            expected = torch.where(held.cpu(), before, expected)
        updated = (after - expected).abs() > TOLERANCE * float(expected.abs().max())
        masked = masked.cpu().expand_as(updated)
        wrong, all_masked = int((updated & masked).sum()), int(masked.sum())
        if wrong:
            raise RunError(
                f"the optimizer saw a gradient in {wrong} of {all_masked} masked weights of '{name}': this engine "
                "ignores edited gradients, so its modifiers would do nothing; use engine=torch or another "
                "engine.zero_stage, or take gradient accumulation types out of engine.extra"
            )
        return bool((updated & ~masked).any())


def _sampled_names(names: list[str]) -> list[str]:
    """Return two neighbours (A and B of LoRA, whose A has no gradient at first) at start, middle and end."""
    middle = len(names) // 2
    indices = {0, 1, middle, middle + 1, len(names) - 2, len(names) - 1}
    return [name for index, name in enumerate(names) if index in indices]
