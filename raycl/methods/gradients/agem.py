"""A-GEM: a gradient that would raise the loss on earlier tasks loses its component along theirs.

    g <- g - (g.r / r.r) r   where g.r < 0

g is the step's gradient over all trained parameters as one vector, r the gradient of the mean task loss on a random
batch of stored rows of all earlier tasks, at the present weights (Chaudhry et al. 2019, "Efficient Lifelong Learning
with A-GEM", eq. 11). Both are summed over all workers before the sign is read, so N workers equal one. r is the
gradient of the task loss alone, without the learner's penalty. It is computed as in training, with dropout where the
model has any, and over all labels seen so far. The authors' code computes it without dropout, and each row's loss over
the labels of the row's own task (conv_split_cifar.py:402-417 of facebookresearch/agem at 4542149).
The paper stores a number of examples per class; here a share of each task's rows is stored, as in `replay`. The paper
trains with plain SGD: with AdamW the guarantee holds for the gradient that the optimizer is given, not for its update.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from raycl.data.selection import generator
from raycl.data.sources.cache import Indices
from raycl.methods.context import TaskContext
from raycl.methods.gradients.projection import StoredRowsConfig, StoredRowsWrapper, plus, product
from raycl.types import Task


class AgemConfig(StoredRowsConfig):
    """Any learner, whose gradients are projected so that the loss on stored rows does not rise."""

    name: Literal["agem"] = "agem"
    share: float = Field(
        0.02, gt=0, le=1, description="share of each task's train rows that is stored, at least one row"
    )
    batch: int = Field(64, ge=1, description="stored rows of all earlier tasks behind each reference gradient")

    kept_share = "share"
    unused_in_first_phase = ("share", "batch")

    def values_kept(self, tasks: int) -> int:
        """Return the reference gradient, in a step."""
        return min(1, tasks - 1)


class Agem(StoredRowsWrapper):
    """Any learner that trains one model for all labels, with projected gradients."""

    Config = AgemConfig

    def rows_of(self, task: Task, context: TaskContext) -> Indices:
        return context.stored_rows(task, self.config.share)

    def projected(self, gradients: dict[str, Tensor], context: TaskContext) -> dict[str, Tensor]:
        return project(gradients, context.gradients(self._drawn(context.step.seed)))

    def _drawn(self, seed: int) -> list[tuple[Task, Indices]]:
        """Return rows of the reference gradient: drawn from all stored rows without replacement, task by task."""
        counts = np.array([len(rows) for _, rows in self.stored])
        chosen = np.sort(generator(seed, "agem").permutation(counts.sum())[: self.config.batch])
        firsts = np.cumsum(counts) - counts
        parts = [
            (task, rows[chosen[(chosen >= first) & (chosen < first + len(rows))] - first])
            for (task, rows), first in zip(self.stored, firsts, strict=True)
        ]
        return [(task, rows) for task, rows in parts if len(rows)]


def project(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `g - (g.r / r.r) r` where `g.r < 0`, else g itself; one vector over all parameters of `gradients`.

    Products are summed in float64. A reference of zeros changes nothing.
    """
    against = product(gradients, reference)
    if against >= 0:  # 0 where the reference is
        return dict(gradients)
    size = product({name: reference[name] for name in gradients}, reference)
    return plus(gradients, [-against / size], [reference])
