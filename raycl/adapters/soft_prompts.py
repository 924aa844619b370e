"""Soft prompts as adapters: a few learned positions in front of the text, or behind it, mixed per example.

`sum`: P(x) = sum_i w_i P_i, the length stays (SAPT-Prompt: SAPT, eq. 3); prompts of different lengths end at the text,
and shorter ones are zero in front, up to the longest that is active for the example. `concat`: the prompts of all
adapters that are active for an example, one after another and unweighted, in the order of their names (DTKR+Prompt,
L2P) or in a given one (Progressive Prompts: the newest first). An example without an active adapter has its prompt
positions masked.

Prompts in training may have another form (SLM, appendix A.5): with an MLP beside them, P' = MLP(P) + P (eq. 10,
Progressive Prompts), or behind a gate that starts at zero, P' = gate P (eq. 11, LLaMA-Adapter). What is learned is kept
as P', so frozen prompts are plain, and no task id is needed to find a task's MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from raycl.errors import AdapterError
from raycl.types import AdapterState

if TYPE_CHECKING:
    from raycl.adapters.stack import AdapterStack

How = Literal["sum", "concat"]

Form = Literal["plain", "mlp", "gate"]

MLP = ("mlp_in", "mlp_in_bias", "mlp_out", "mlp_out_bias")
"""Parameters of the MLP: `[H, D]`, `[H]`, `[D, H]`, `[D]`."""


@dataclass(frozen=True)
class PromptForm:
    """The form in which prompts are trained.

    Attributes:
        kind: plain: the prompts; mlp: also an MLP, which the prompts of a task share; gate: also a factor for each.
        width: hidden units of the MLP.
    """

    kind: Form = "plain"
    width: int = 800


PLAIN = PromptForm()


@dataclass(frozen=True)
class PromptUse:
    """The use of an adapter's prompt in a mixture.

    Attributes:
        concatenated: it stands beside the sum of the others instead of being added to it.
        order: sorts concatenated prompts.
        is_here: False: it stands at the other side of texts, where another `MixedPrompts` has it.
    """

    concatenated: bool = False
    order: tuple[int, str] = (0, "")
    is_here: bool = True


UseOf = Callable[[str], PromptUse]
"""Adapter -> how its prompt is used."""


def used_alike(how: How, adapter: str) -> PromptUse:
    """Return a use under which all prompts are summed, or concatenated in the order of their adapters' names."""
    return PromptUse(how == "concat", (0, adapter))


ADDED_UP: UseOf = partial(used_alike, "sum")


class MixedPrompts(nn.Module):
    """Prompt positions of the active mixture.

    Attributes:
        trainable: `[M, P, D]` prompts in training, one for each of the stack's adapters in training; None without.
        gate: `[M]` their factors, where the form has them. mlp_in, mlp_in_bias, mlp_out, mlp_out_bias: see `MLP`.
    """

    def __init__(self, stack: AdapterStack, width: int, use_of: UseOf = ADDED_UP) -> None:
        """Mix the prompts of a stack's adapters.

        Args:
            width: width of a position.
            use_of: asked in each forward pass for the adapters of the mixture.
        """
        super().__init__()
        self.width = width
        self._use_of = use_of
        for name in ("trainable", "gate", *MLP):
            self.register_parameter(name, None)
        self.trainable: nn.Parameter | None
        self.gate: nn.Parameter | None
        self.mlp_out: nn.Parameter | None
        self.mlp_out_bias: nn.Parameter | None
        self._stack = stack

    def begin_training(self, start_MPD: Tensor, form: PromptForm = PLAIN) -> None:
        """Train these prompts, one per adapter in training.

        An MLP is drawn as torch draws linears; a gate starts at zero.
        """
        assert len(start_MPD) == len(self._stack.trainable), "one prompt for each adapter in training"
        self.trainable = nn.Parameter(start_MPD.clone())
        device, width = start_MPD.device, start_MPD.shape[2]
        if form.kind == "gate":
            self.gate = nn.Parameter(torch.zeros(len(start_MPD), device=device))
        if form.kind == "mlp":
            shapes = ((form.width, width), (form.width,), (width, form.width), (width,))
            for name, shape, inputs in zip(MLP, shapes, (width, width, form.width, form.width), strict=True):
                drawn = nn.init.uniform_(
                    torch.empty(shape, device="cpu"), -1 / math.sqrt(inputs), 1 / math.sqrt(inputs)
                )
                setattr(self, name, nn.Parameter(drawn.to(device)))

    def fill(self, states: Mapping[str, AdapterState]) -> None:
        """Initialize prompts in training from these adapters, whatever their form."""
        for number, name in enumerate(self._stack.trainable):
            prompt = states[name].prompt if name in states else None
            if prompt is None or self.trainable is None:
                continue
            self.trainable.data[number].copy_(prompt)
            if self.gate is not None:
                self.gate.data[number] = 1.0
            for layer in (self.mlp_out, self.mlp_out_bias):
                if layer is not None:
                    layer.data.zero_()

    def end_training(self) -> None:
        for name in ("trainable", "gate", *MLP):
            setattr(self, name, None)

    def forward(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the prompt positions `[rows, P, D]` and their mask `[rows, P]`; None without prompts."""
        plan = self._stack.plan
        if plan is None:
            return None
        prompts = self._prompts(plan.mixture.names, device)
        if not prompts:
            return None
        names, weights = plan.mixture.names, plan.for_rows(plan.mixture.weights, rows)
        uses = {column: self._use_of(names[column]) for column in prompts}
        apart = [column for column in prompts if uses[column].concatenated]
        if not apart:
            summed_BPD, mask_BP = self._summed(prompts, weights[:, list(prompts)])
            is_even = len({len(prompt) for prompt in prompts.values()}) == 1
            return (summed_BPD, mask_BP) if is_even else _left_padded(summed_BPD, mask_BP)
        parts: list[tuple[Tensor, Tensor]] = []
        if len(apart) < len(prompts):
            summed = {column: prompt for column, prompt in prompts.items() if not uses[column].concatenated}
            parts.append(self._summed(summed, weights[:, list(summed)]))
        for column in sorted(apart, key=lambda column: uses[column].order):
            parts.append(self._summed({column: prompts[column]}, (weights[:, [column]] != 0).to(weights)))
        return _left_padded(torch.cat([part for part, _ in parts], 1), torch.cat([mask for _, mask in parts], 1))

    def _prompts(self, names: tuple[str, ...], device: torch.device) -> dict[int, Tensor]:
        """Return the column of the mixture -> prompt `[P, D]`."""
        trainable = list(self._stack.trainable)
        is_trained = self.trainable is not None and not self._stack.trainable.keys().isdisjoint(names)
        formed_MPD = formed(dict(self.named_parameters())) if is_trained else None
        prompts: dict[int, Tensor] = {}
        for column, name in enumerate(names):
            if not self._use_of(name).is_here:
                continue
            if name in trainable and formed_MPD is not None:
                prompts[column] = formed_MPD[trainable.index(name)]
            elif name in self._stack.states and (prompt := self._stack.states[name].prompt) is not None:
                if prompt.shape[1] != self.width:
                    raise AdapterError(
                        f"adapter '{name}' has a prompt of width {prompt.shape[1]}, the model's is {self.width}"
                    )
                prompts[column] = prompt.to(device)
        return prompts

    def _summed(self, prompts: dict[int, Tensor], weights_BN: Tensor) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts.values()))
        stacked_NPD = torch.stack([pad(prompt, (0, 0, longest - len(prompt), 0)) for prompt in prompts.values()])
        summed_BPD = torch.einsum("bn,npd->bpd", weights_BN.to(stacked_NPD.dtype), stacked_NPD)
        reached_P = torch.arange(longest, 0, -1, device=weights_BN.device)
        length_N = torch.tensor([len(prompt) for prompt in prompts.values()], device=weights_BN.device)
        length_B1 = ((weights_BN.detach() != 0) * length_N).amax(1, keepdim=True)
        return summed_BPD, (reached_P <= length_B1).long()


def formed(values: Mapping[str, Tensor]) -> Tensor:
    """Return `[M, P, D]` prompts as the model reads them, from what is trained (parameters of `MixedPrompts`)."""
    prompts_MPD = values["trainable"]
    if "gate" in values:
        return prompts_MPD * values["gate"][:, None, None]
    if "mlp_in" in values:
        inner_MPH = linear(prompts_MPD, values["mlp_in"], values["mlp_in_bias"]).tanh()
        return linear(inner_MPH, values["mlp_out"], values["mlp_out_bias"]) + prompts_MPD
    return prompts_MPD


def _left_padded(prompts_BPD: Tensor, mask_BP: Tensor) -> tuple[Tensor, Tensor]:
    """Move masked positions to the left of each example, and drop them where no example needs them.

    A prompt must be directly before its text where positions are relative.
    """
    longest = int(mask_BP.sum(1).max())
    order_BP = mask_BP.argsort(dim=1, stable=True)[:, mask_BP.shape[1] - longest :]
    moved_BPD = prompts_BPD.gather(1, order_BP.unsqueeze(-1).expand(-1, -1, prompts_BPD.shape[2]))
    mask_BP = mask_BP.gather(1, order_BP)
    return moved_BPD * mask_BP.unsqueeze(-1).to(moved_BPD.dtype), mask_BP
