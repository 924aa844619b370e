"""EWC: parameters that matter to earlier tasks are held near their values, each by its Fisher information.

    loss + weight / 2 * sum over parameters p of F_p (theta_p - theta*_p)^2

theta* are the parameters at the end of the last task. F is the diagonal of the Fisher information: when a task ends,
the mean over `rows` of its training rows of the squared gradient of the row's task loss (of its true answer), each row
in a pass of its own, without dropout, over all workers. One F is kept for all tasks, F <- (F_new + t F) / (t + 1) after
t earlier tasks (`merge=mean`; Kirkpatrick et al. 2017, "Overcoming catastrophic forgetting in neural networks", eq. 3,
keep one for each; the merged form and `weight` 5000 are those of ContinualLM's code). With `merge=sum` F is added up
over tasks, as in TRACE. `weight` depends on both conventions, and on what a row's loss is: here the mean over its
tokens.
All parameters that the learner trains are held. Rows of labels that are new to the label head have F = 0.
Where the codes differ: both square gradients of whole batches, not of rows, and let the penalty's own gradient into F,
so that their weights are nominal here.
- ContinualLM measures F with dropout, on 10,000 rows. It squares gradients averaged over all GPUs and multiplies by the
  rows of one, 100. With 4 GPUs that is a quarter of F here where gradients of rows are independent and add up to zero;
  in float16 the square of the loss scale comes on top. Its 5000 is the best of a search on images (Serra et al. 2018;
  joansj/hat, src/approaches/ewc.py).
- TRACE (model/Regular/EWC.py, `weight` 400) adds to F in every step of every epoch, so that a running task is held by
  its own F, and on each worker apart. After E epochs F is E times a mean over micro-batches of two rows, of losses
  divided by the accumulation, 8: 400 there is about 400 E / 64 here, or half of it where rows are independent.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.methods.base import Learned, State, trained_names, under
from raycl.methods.context import TaskContext
from raycl.methods.trained_adapters import in_present_rows, known_labels
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Batch, Phase


class EwcConfig(WrapperConfig):
    """Any learner, with a penalty that holds what matters to earlier tasks."""

    name: Literal["ewc"] = "ewc"
    weight: float = Field(5000.0, ge=0, description="lambda, the weight of the penalty; depends on `merge`")
    rows: int | None = Field(
        256, ge=1, description="training rows of each task that the Fisher information is computed from; null: all"
    )
    merge: Literal["mean", "sum"] = Field(
        "mean", description="Fisher information of several tasks: mean (ContinualLM), or sum (TRACE)"
    )

    unused_in_first_phase: ClassVar[tuple[str, ...]] = ("weight", "merge")

    def values_kept(self, tasks: int) -> int:
        """Count Fisher information and the parameter."""
        return 2


class Ewc(Wrapper):
    """Any learner that trains the same parameters in every task, with EWC's penalty."""

    Config = EwcConfig
    needs_shared = "parameters"
    computes_gradients: ClassVar[bool] = True

    def __init__(self, config: EwcConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self._fisher: dict[str, Tensor] = {}
        self._old: dict[str, Tensor] = {}
        self._labels: list[str] = []
        self._tasks = 0
        self._trained: dict[str, Tensor] = {}

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Extend the held parameters to the present rows of the label head."""
        self.learner.begin_task(phase, context)
        self._fit_labels()
        own = dict(self.backbone.named_parameters())
        self._trained = {name: own[name] for name in self._fisher}

    def _fit_labels(self) -> None:
        """Add rows of new labels, and move tensors to the device of their parameter."""
        self._fisher, self._old = (
            in_present_rows(kept, self._labels, self.backbone) for kept in (self._fisher, self._old)
        )
        self._labels = known_labels(self.backbone)

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Depends on parameters alone, so every step adds it once; with the learner's."""
        others = self.learner.penalty(batch, output)
        if not self._fisher or not self.config.weight:
            return others
        terms = [
            (self._fisher[name] * (parameter.float() - self._old[name]).square()).sum()
            for name, parameter in self._trained.items()
        ]
        own: Tensor = self.config.weight / 2 * torch.stack(terms).sum()
        return own if others is None else own + others

    def end_task(self, context: TaskContext) -> Learned | None:
        """Fisher information of the task, and its parameters."""
        self._fit_labels()
        new = self._measured(context)
        for name, value in new.items():
            old = self._fisher.get(name, torch.zeros_like(value))
            self._fisher[name] = merged(value, old, self._tasks) if self.config.merge == "mean" else value + old
        own = dict(self.backbone.named_parameters())
        self._old = {name: own[name].detach().float().clone() for name in new}
        self._tasks, self._trained = self._tasks + 1, {}
        return self.learner.end_task(context)

    def _measured(self, context: TaskContext) -> dict[str, Tensor]:
        """Parameter -> mean over rows of the squared gradient, over all workers. Collective."""
        rows = [(task, context.stored_rows(task, limit=self.config.rows)) for task in context.phase.tasks]
        own = dict(self.backbone.named_parameters())
        information = {name: torch.zeros_like(own[name], dtype=torch.float32) for name in trained_names(self.backbone)}
        for _, gradients in context.row_gradients(rows):
            for name, gradient in gradients.items():
                information[name] += gradient.square()
        count = sum(len(chosen) for _, chosen in rows)
        return {name: context.sum(total) / count for name, total in information.items()}

    def state_dict(self) -> State:
        values, tensors = self.learner.state_dict()
        held = {f"ewc/fisher/{name}": value.cpu() for name, value in self._fisher.items()}
        held |= {f"ewc/parameter/{name}": value.cpu() for name, value in self._old.items()}
        return {**values, "ewc": {"tasks": self._tasks, "labels": self._labels}}, tensors | held

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.learner.load_state_dict(values, tensors)
        self._tasks, self._labels = values["ewc"]["tasks"], list(values["ewc"]["labels"])
        self._fisher, self._old = dict(under("ewc/fisher/", tensors)), dict(under("ewc/parameter/", tensors))


def merged(new: Tensor, old: Tensor, tasks: int) -> Tensor:
    """Return the mean Fisher information over tasks, `tasks` of them in `old`."""
    return (new + tasks * old) / (tasks + 1)
