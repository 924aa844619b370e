"""GEM: gradients are changed as little as possible so that the loss of no earlier task rises.

With g the step's gradient over all trained parameters as one vector, and rows m_k of M the gradients of the mean task
loss on the stored rows of each earlier task k, at the present weights: where some m_k.g < 0,

    v = argmin 1/2 v^T (M M^T + 1e-3 I) v + (M g)^T v   with every v_k >= margin
    g <- g + M^T v

(Lopez-Paz and Ranzato 2017, "Gradient Episodic Memory for Continual Learning", eq. 11 and section 3; 1e-3, the margin
of 0.5 and 256 stored rows a task are those of the authors' code). The margin lifts all v_k, those of tasks that agree
with g too. Gradients are summed over all workers before signs are read, so N workers equal one; m_k are those of the
task loss alone, without the learner's penalty. They are computed as in training, with dropout where the model has any;
the authors' networks have none.
On CIFAR-100 the authors' code takes the loss of each old task over the labels of that task alone (gem.py:181-188 of
facebookresearch/GradientEpisodicMemory at 34c6b8e). Here it is over all labels seen so far; `train.label_loss=task`
narrows the loss of the present task's labels alone.
Every step computes the gradient of every earlier task anew, on all of its stored rows: `agem` takes one batch of them.
The quadratic program is solved as nonnegative least squares. The authors store the last rows of each task, here they
are drawn. They train with plain SGD: with AdamW the guarantee holds for the gradient that the optimizer is given, not
for its update. TRACE's code keeps one old gradient for each task instead of rows, and its solver's signs are reversed.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.data.sources.cache import Indices
from raycl.methods.context import TaskContext
from raycl.methods.gradients.projection import Gradients, StoredRowsConfig, StoredRowsWrapper, gram, plus, product
from raycl.types import Task

RIDGE = 1e-3
"""Added to the diagonal of M M^T, so that v is unique."""


class GemConfig(StoredRowsConfig):
    """Any learner, whose gradients are projected so that the loss of no earlier task rises."""

    name: Literal["gem"] = "gem"
    rows: int = Field(256, ge=1, description="training rows of each task that are stored, and read again in every step")
    margin: float = Field(0.5, ge=0, description="least weight of each earlier task's gradient, where g is changed")

    unused_in_first_phase = ("rows", "margin")

    def values_kept(self, tasks: int) -> int:
        """Return a gradient of each earlier task, in a step."""
        return tasks - 1


class Gem(StoredRowsWrapper):
    """Any learner that trains one model for all labels, with projected gradients."""

    Config = GemConfig

    def rows_of(self, task: Task, context: TaskContext) -> Indices:
        return context.stored_rows(task, limit=self.config.rows)

    def projected(self, gradients: dict[str, Tensor], context: TaskContext) -> dict[str, Tensor]:
        references = [context.gradients([stored]) for stored in self.stored]
        return project(gradients, references, self.config.margin)


def project(gradients: Gradients, references: Sequence[Gradients], margin: float) -> dict[str, Tensor]:
    """Return `g + M^T v` where some reference has a negative product with g, else g itself."""
    products = [product(gradients, reference) for reference in references]
    if min(products) >= 0:
        return dict(gradients)
    weights = dual(gram(references), torch.tensor(products, dtype=torch.float64), margin)
    return plus(gradients, weights.tolist(), references)


def dual(gram_KK: Tensor, products_K: Tensor, margin: float) -> Tensor:
    """Return `[K]` v that minimizes `1/2 v^T P v + q^T v` over v >= margin, P = M M^T + 1e-3 I, q = M g.

    With P = R^T R and v = u + margin this is the least |R u + R^-T (P margin + q)| over u >= 0.
    """
    from scipy.optimize import nnls  # half a second of imports

    count = len(products_K)
    values_K, vectors_KK = torch.linalg.eigh(gram_KK + RIDGE * torch.eye(count, dtype=torch.float64))
    roots_K1 = values_K.clamp(min=RIDGE).sqrt().unsqueeze(1)  # without rounding no value is smaller
    root_KK, inverse_KK = roots_K1 * vectors_KK.T, vectors_KK.T / roots_K1
    margins_K = torch.full((count,), margin, dtype=torch.float64)
    linear_K = root_KK.T @ (root_KK @ margins_K) + products_K
    solution_K, _ = nnls(root_KK.numpy(), -(inverse_KK @ linear_K).numpy())
    return margins_K + torch.from_numpy(solution_K)
