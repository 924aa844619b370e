"""FGGM: only the weight rows with the largest Fisher information for a task are updated while it is learned.

    F_p = mean over the task's training rows of (d log p(y | x) / d theta_p)^2, before its first step
    s_o = sum over inputs i of F_oi  for a weight [O, D];  s = F for biases and norms
    the share `threshold` of a parameter's s with the smallest values gets no gradient in this task

Tan et al. 2026, "FGGM: Fisher-Guided Gradient Masking for Continual Learning", arXiv:2601.18261, sections 2 and 3
(Fisher information, quantile, sum over the inputs of an output neuron, masked gradients); 0.7 is the paper's. No rows
of earlier tasks are read, and nothing is kept between tasks. The authors' code is not public. The paper's text is read
here as it is reported by others, who do not agree in two points, so that both are settings: `scope` (the quantile is
taken in each parameter, or over all at once, as in the public reproduction that reaches the published score on TRACE),
and `skip_first_task` (that reproduction leaves the first task unmasked).

Deviations: a row's log-likelihood is the mean over its answer's tokens, and gradients are those of each row alone,
without dropout. A parameter whose Fisher information is zero throughout is not masked, because it says nothing about
its rows: A of a LoRA while B is zero, and everything below a label head that has learned nothing. Label heads, which
the paper's models do not have, and soft prompts are not masked. Weight decay still moves masked rows.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from raycl.backbone.roles import is_linear
from raycl.errors import RunError
from raycl.methods.base import Method
from raycl.methods.context import TaskContext
from raycl.methods.migu.row_selection import kept
from raycl.methods.modifier import GradientModifier, ModifierConfig
from raycl.types import Phase


class FggmConfig(ModifierConfig):
    """FGGM: only the weight rows with the largest Fisher information are updated."""

    name: Literal["fggm"] = "fggm"
    threshold: float = Field(0.7, ge=0, le=1, description="share of the rows that is masked")
    scope: Literal["parameter", "model"] = Field(
        "parameter", description="rows that are ranked together: those of each parameter, or of all"
    )
    rows: int | None = Field(
        None, ge=1, description="training rows of each task that the Fisher information is computed from; null: all"
    )
    skip_first_task: bool = Field(False, description="do not mask the run's first task, if there are others")

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Return the pass with gradients over every row; with `rows`, fewer are read."""
        return 1 / epochs


class Fggm(GradientModifier):
    """The mask of a task."""

    Config = FggmConfig
    computes_gradients: ClassVar[bool] = True

    def __init__(self, config: FggmConfig, method: Method) -> None:
        super().__init__(config, method)
        self.config: FggmConfig
        self._masked: dict[str, Tensor] = {}
        self._active = False
        self._summary: dict[str, Any] = {}

    def begin_task(self, phase: Phase, only: bool, resumed: bool) -> None:
        """Name the parameters that can be masked.

        Raises:
            RunError: there is none.
        """
        self._active = only or phase.index > 0 or not self.config.skip_first_task
        trained = self._trained()
        if not trained:
            raise RunError(
                f"modifiers.fggm finds no trained weight at task '{phase.name}': expected a method that trains weights "
                "of the model or of adapters; drop the modifier"
            )
        self.parameter_names = tuple(trained) if self._active else ()
        self._mask({name: self._masked[name].to(trained[name].device) for name in self._masked} if resumed else {})

    def _trained(self) -> dict[str, nn.Parameter]:
        named = self.method.backbone.named_parameters()
        return {name: parameter for name, parameter in named if name.startswith("model.") and parameter.requires_grad}

    def _mask(self, masked: dict[str, Tensor]) -> None:
        self._masked, self.names = masked, tuple(masked)

    def observe_gradients(self, context: TaskContext) -> None:
        """Choose the rows of the task by their Fisher information. Collective."""
        if self._active:
            scores = self._scores(context)
            self._mask(masked_rows(scores, self.config.threshold, together=self.config.scope == "model"))
            self._summary = {"masked": True, "rows_kept": kept_shares(scores, self._masked)}
        else:
            self._summary = {"masked": False}

    def _scores(self, context: TaskContext) -> dict[str, Tensor]:
        """Return the Fisher information of each row, in a shape that broadcasts to its parameter."""
        rows = [(task, context.stored_rows(task, limit=self.config.rows)) for task in context.phase.tasks]
        trained, turned = self._trained(), self._turned()
        axes = {name: 0 if name in turned else -1 for name, parameter in trained.items() if parameter.dim() > 1}
        totals: dict[str, Tensor] = {}
        for name, parameter in trained.items():
            like = parameter.detach().float()
            totals[name] = torch.zeros_like(like.sum(axes[name], keepdim=True) if name in axes else like)
        for _, gradients in context.row_gradients(rows):
            for name, total in totals.items():
                squares = gradients[name].square()
                total += squares.sum(axes[name], keepdim=True) if name in axes else squares
        count = sum(len(chosen) for _, chosen in rows)
        return {name: context.sum(total) / count for name, total in totals.items()}

    def _turned(self) -> set[str]:
        """Return names of weights that are kept `[D, O]`, as in Hugging Face's `Conv1D`."""
        modules = self.method.backbone.model.named_modules()
        linears = [(path, module) for path, module in modules if is_linear(module)]
        return {f"model.{path}.weight" for path, module in linears if not isinstance(module, nn.Linear)}

    def __call__(self, name: str, gradient: Tensor) -> Tensor:
        """Set a gradient to exactly zero where it is masked."""
        return gradient.masked_fill_(self._masked[name], 0)

    def masked(self, name: str) -> Tensor | None:
        return self._masked.get(name)

    def end_task(self) -> None:
        """Forget the task's mask; the summary stays."""
        self._mask({})

    def summary(self) -> dict[str, Any]:
        """Return whether the phase was masked, and the share of each parameter's rows that was trained in it."""
        return self._summary

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the mask of the task that has begun, and the summary."""
        return {"summary": self._summary}, {name: masked.cpu() for name, masked in self._masked.items()}

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the mask, which `begin_task` moves to its parameters' device."""
        self._summary, self._masked = dict(state.get("summary", {})), dict(tensors)


def masked_rows(scores: Mapping[str, Tensor], share: float, together: bool) -> dict[str, Tensor]:
    """Return the rows that are masked, as bools, of the parameters that have any Fisher information.

    Args:
        scores: parameter -> Fisher information of its rows. share: share of the rows that is masked, rounded down.
        together: all rows are ranked together, and not those of each parameter.
    """
    known = {name: score for name, score in scores.items() if bool(score.any())}
    if not together:
        return {name: ~kept(score.view(1, -1), share, "floor").view_as(score) for name, score in known.items()}
    if not known:
        return {}
    found = kept(torch.cat([score.flatten() for score in known.values()]).unsqueeze(0), share, "floor")[0]
    parts = torch.split(found, [score.numel() for score in known.values()])
    return {name: ~part.view_as(score) for (name, score), part in zip(known.items(), parts, strict=True)}


def kept_shares(scores: Mapping[str, Tensor], masked: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share of each parameter's rows that is trained."""
    return {name: 1.0 if name not in masked else round(1 - float(masked[name].float().mean()), 4) for name in scores}
