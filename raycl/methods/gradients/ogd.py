"""OGD: gradients lose their components along those of earlier tasks' outputs.

    g <- g - V V^T g

g is the step's gradient over all trained parameters as one vector. The columns of V are orthonormal: when a task ends,
the gradients of the model's outputs on `rows` of its training rows, at its parameters then, are added by Gram-Schmidt
(Farajtabar et al. 2020, "Orthogonal Gradient Descent for Continual Learning", algorithm 1). The output of a row is the
logit of its true label (their OGD-GTL, with 200 rows a task); for models that write their answers, the sum of the
logits of the answer's tokens. Columns that lie in the span of those before them are left out.
No text is kept, but V: as many values as `rows` x tasks x trained parameters, on the device. So it is for adapters
rather than for whole models. V does not depend on the number of workers. Rows of labels that are new to the label head
are new parameters: V is zero there.
The paper trains with plain SGD (`train.optimizer=sgd`, its rate 1e-3 and batch 10): with AdamW the guarantee holds for
the gradient that the optimizer is given, not for its update. TRACE's code stores gradients of the loss instead, of each
step of the last epoch, and all its columns are the same one.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone
from raycl.methods.base import Learned, State, under
from raycl.methods.context import TaskContext
from raycl.methods.gradients.projection import Gradients
from raycl.methods.trained_adapters import in_present_rows, known_labels
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Phase

ROUNDING = 1e-4
"""The part of a gradient outside of the span of others is a rounding error below this share of its norm."""


class OgdConfig(WrapperConfig):
    """Any learner, whose gradients are orthogonal to those of earlier tasks' outputs."""

    name: Literal["ogd"] = "ogd"
    rows: int = Field(
        200, ge=1, description="training rows of each task whose outputs' gradients are kept, each as large as g"
    )

    def values_kept(self, tasks: int) -> int:
        """Return a column for each row of each task, and the last task's gradients beside them."""
        return self.rows * (tasks + 1)


class Ogd(Wrapper):
    """Any learner that trains the same parameters in every task, with projected gradients."""

    Config = OgdConfig
    needs_shared = "parameters"
    computes_gradients: ClassVar[bool] = True

    def __init__(self, config: OgdConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self._basis: dict[str, Tensor] = {}
        self._labels: list[str] = []

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Extend the basis to the present rows of the label head."""
        self.learner.begin_task(phase, context)
        self._fit_labels()

    def _fit_labels(self) -> None:
        """Zeros at new labels; everything on the device of its parameter."""
        self._basis = in_present_rows(self._basis, self._labels, self.backbone, axis=1)
        self._labels = known_labels(self.backbone)

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the learner, without their part in the span of the basis."""
        return outside(self.learner.transform_gradients(gradients), self._basis)

    def end_task(self, context: TaskContext) -> Learned | None:
        """Return the basis gains the task's outputs."""
        self._fit_labels()
        self._basis = grown(self._basis, self._measured(context))
        return self.learner.end_task(context)

    def _measured(self, context: TaskContext) -> dict[str, Tensor]:
        """Return parameter -> `[N, *shape]` gradients of the outputs on N rows, on every worker. Collective."""
        rows = [(task, context.stored_rows(task, limit=self.config.rows)) for task in context.phase.tasks]
        count = sum(len(chosen) for _, chosen in rows)
        own = {name: p for name, p in self.backbone.named_parameters() if p.requires_grad and p.numel()}
        result = {name: torch.zeros(count, *p.shape, device=p.device) for name, p in own.items()}
        for row, gradients in context.row_gradients(rows, of="outputs"):
            for name, gradient in gradients.items():
                result[name][row] = gradient
        return {name: context.sum(rows_of_all) for name, rows_of_all in result.items()}

    def state_dict(self) -> State:
        values, tensors = self.learner.state_dict()
        held = {f"ogd/basis/{name}": value.cpu() for name, value in self._basis.items()}
        return {**values, "ogd": {"labels": self._labels}}, tensors | held

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.learner.load_state_dict(values, tensors)
        self._labels = list(values["ogd"]["labels"])
        self._basis = dict(under("ogd/basis/", tensors))


def outside(gradients: Gradients, basis: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `g - V V^T g`; V is parameter -> `[K, *shape]`."""
    flat = {name: (gradient, basis[name].flatten(1)) for name, gradient in gradients.items() if name in basis}
    if not flat:
        return dict(gradients)
    along_K = torch.stack([columns.to(g.device) @ g.flatten().float() for g, columns in flat.values()]).sum(0)
    rest = dict(gradients)
    for name, (g, columns_KP) in flat.items():
        rest[name] = (g.float() - (along_K @ columns_KP.to(g.device)).view_as(g)).to(g.dtype)
    return rest


def grown(basis: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the basis with an orthonormal column for each new gradient outside of the span of those before it.

    Args:
        basis: parameter -> `[K, *shape]`, may lack parameters. new: parameter -> `[N, *shape]`.
    """
    count = len(next(iter(basis.values()))) if basis else 0
    held = {name: basis.get(name, rows.new_zeros(count, *rows.shape[1:])) for name, rows in new.items()}
    result = {name: torch.cat([held[name], torch.zeros_like(rows)]) for name, rows in new.items()}
    for row in range(len(next(iter(new.values())))):
        whole = {name: rows[row] for name, rows in new.items()}
        left = outside(outside(whole, result), result)  # once more removes what rounding left
        size = norm(left)
        if size > ROUNDING * norm(whole):
            for name, value in left.items():
                result[name][count] = value / size
            count += 1
    return {name: columns[:count].clone() for name, columns in result.items()}


def norm(gradients: Gradients) -> float:
    """Return the norm of one vector over all parameters."""
    return float(torch.stack([value.double().square().sum() for value in gradients.values()]).sum().sqrt())
