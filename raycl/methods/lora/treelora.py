"""TreeLoRA: one LoRA whose layers are each drawn towards those of the similar earlier task that a bandit has found.

    loss + c S / |S|,  c = -weight (t / T) loss,  S = sum over linears l of <A_l, M_n(l),l>

without a gradient through c and |S|: step t of the T of an epoch raises the alignment of each A with M_n, its mean over
the last epoch of task n, in proportion to the loss. n is chosen for each linear anew in each step, by descending a tree
of the tasks to the child of the lowest confidence bound

    mean of |A's mean so far in the epoch - M_n|_1 over the choices below it - sqrt(log(2 T (t+1) (t+2)) / (2 choices))

The tree is built after each task: the node at depth l halves its tasks at the median of <g, mean of g> over its tasks,
where g = M_n - M_n-1 at linear l is the direction in which task n went (Qian et al. 2025, "TreeLoRA: Efficient
Continual Learning via Layer-Wise LoRAs Guided by a Hierarchical Gradient-Similarity Tree", ICML 2025,
arXiv:2506.10355; code: model/Regular/Tree_LoRA.py and utils/kd_lora_tree.py of ZinYY/TreeLoRA at c6a9b6d). `weight` 0.5
is theirs, with rank 8, alpha 32, a rate of 1e-4 and a dropout of 0.1.

Like the code, this takes values of A for what the paper calls gradients: from task to task they differ by updates.
Deviations: the code draws n from a softmax over distance plus bonus, so that tasks that are far are preferred to near
ones, and weighs the tasks of one child of the root by its threshold; here the lowest bound of the distance is taken at
each node, as the paper's abstract has it. The code's mean so far is a sum over the epoch's steps so far, divided by all
of the epoch's and multiplied by the number of linears; here it is a mean, which at an epoch's end is the same up to
that factor. Choices are made once a step of the optimizer, not once a forward pass. S is taken by its sign: the code's
penalty repels where S is negative. The value of the penalty is zero, and its gradient as above, so that losses can be
compared. The method was compared with the code, not with the paper's text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone, Output
from raycl.backbone.base import loss_count
from raycl.methods.base import Learned, MethodConfig, State, under
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import BY_LINEAR, LoraSettings
from raycl.methods.single_adapter import Lora
from raycl.types import Batch, Phase


class TreeLoraConfig(LoraSettings, MethodConfig):
    """TreeLoRA: one LoRA that is drawn towards that of similar earlier tasks, layer by layer."""

    name: Literal["treelora"] = "treelora"
    weight: float = Field(
        0.5,
        ge=0,
        description="share of the loss by which alignment counts at an epoch's end; none of it in epochs of one step",
    )

    unused_for_single_task: ClassVar[tuple[str, ...]] = ("weight",)
    unused_in_first_phase: ClassVar[tuple[str, ...]] = ("weight",)
    takes: ClassVar[tuple[str, ...]] = BY_LINEAR

    def values_kept(self, tasks: int) -> int:
        """Count the means of all tasks and of the present epoch."""
        return tasks


@dataclass(frozen=True)
class Node:
    """A node of the tree of tasks.

    Attributes:
        tasks: numbers of the tasks below it. children: nodes that share them; () for a leaf.
    """

    tasks: tuple[int, ...]
    children: tuple[Node, ...] = ()

    @staticmethod
    def of(tasks: Sequence[int], directions: Sequence[Sequence[Tensor]], depth: int = 0) -> Node:
        """Build the tree of tasks.

        Args:
            directions: task -> linear -> direction in which it went, in float32.
        """
        if len(tasks) < 2 or depth >= len(directions[0]):
            return Node(tuple(tasks))
        own = torch.stack([directions[task][depth].flatten() for task in tasks])
        similarities = own @ own.mean(0)
        near = (similarities >= similarities.median()).tolist()
        pairs = list(zip(tasks, near, strict=True))
        halves = [[task for task, is_near in pairs if is_near is side] for side in (True, False)]
        if not all(halves):
            halves = [list(tasks[: len(tasks) // 2]), list(tasks[len(tasks) // 2 :])]
        return Node(tuple(tasks), tuple(Node.of(half, directions, depth + 1) for half in halves))

    def choose(self, distances: Sequence[float], choices: Sequence[int], logarithm: float) -> int:
        """Return the task at the leaf that is reached by descending to children of the lowest confidence bound.

        Args:
            distances: task -> sum of the distances that its choices gave. choices: task -> their number.
            logarithm: that of the bound.
        """
        node = self
        while node.children:
            node = min(node.children, key=lambda child: child.bound(distances, choices, logarithm))
        return min(node.tasks, key=lambda task: Node((task,)).bound(distances, choices, logarithm))

    def bound(self, distances: Sequence[float], choices: Sequence[int], logarithm: float) -> float:
        """Return the lower confidence bound of the distance of the tasks below; see `choose`."""
        count = sum(choices[task] for task in self.tasks)
        if not count:
            return -math.inf
        return sum(distances[task] for task in self.tasks) / count - math.sqrt(logarithm / (2 * count))


class TreeLora(Lora):
    """One LoRA with TreeLoRA's penalty."""

    Config: ClassVar[type[MethodConfig]] = TreeLoraConfig
    adapter = "treelora"

    def __init__(self, config: TreeLoraConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self._context: TaskContext | None = None
        self._means: list[list[Tensor]] = []
        self._tree = Node(())
        self._forget_epoch()

    def _forget_epoch(self) -> None:
        """Begin an epoch, without steps and choices."""
        self._step, self._steps = -1, 0
        self._mean: list[Tensor] = []
        self._chosen: list[int] = []
        linears, tasks = len(self.stack.layers), len(self._means)
        self._distances = [[0.0] * tasks for _ in range(linears)]
        self._choices = [[0] * tasks for _ in range(linears)]

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Train the LoRA on from where the last task left it."""
        super().begin_task(phase, context)
        self._context = context
        device = self.backbone.device
        self._means = [[mean.to(device) for mean in means] for means in self._means]
        self._mean = [mean.to(device) for mean in self._mean]
        if not context.resumed:
            self._forget_epoch()

    def penalty(self, batch: Batch, output: Output) -> Tensor | None:
        """Return what has no value and draws A towards those of the chosen tasks."""
        context = self._context
        if context is None or self.task_id_given:
            return None
        low = [layer.trainable()[0] for layer in self.stack.layers.values()]
        rows = context.count("train") + sum(map(len, context.added))
        steps = -(-rows // context.batch_size)
        if context.step.index != self._step:
            self._observe([part.detach().float() for part in low], context.step.index, steps)
        if not self._chosen or not self.config.weight:
            return None
        pairs = zip(low, self._chosen, strict=True)
        alignment = torch.stack(
            [(part.float() * self._means[task][linear]).sum() for linear, (part, task) in enumerate(pairs)]
        ).sum()
        loss = output.loss_sum.detach() / max(1, loss_count(batch))
        strength = self.config.weight * (self._step % steps) / steps * loss
        pull: Tensor = strength * (alignment.detach() - alignment) / alignment.detach().abs().clamp_min(1e-5)
        return pull

    def _observe(self, low: Sequence[Tensor], step: int, steps: int) -> None:
        """Take A's present values into the epoch's mean, and choose a task for each linear, once before each step."""
        if step % steps == 0:
            self._forget_epoch()
        self._step, self._steps = step, self._steps + 1
        if not self._mean:
            self._mean = [torch.zeros_like(part) for part in low]
        for mean, part in zip(self._mean, low, strict=True):
            mean += (part - mean) / self._steps
        if not self._means:
            return
        turn = step % steps
        logarithm = math.log(2 * steps * (turn + 1) * (turn + 2))
        pairs = list(zip(self._distances, self._choices, strict=True))
        self._chosen = [self._tree.choose(distances, choices, logarithm) for distances, choices in pairs]
        gaps = [
            (mean - self._means[task][linear]).abs().sum()
            for linear, (mean, task) in enumerate(zip(self._mean, self._chosen, strict=True))
        ]
        for (distances, choices), task, gap in zip(pairs, self._chosen, torch.stack(gaps).tolist(), strict=True):
            distances[task] += gap
            choices[task] += 1

    def end_task(self, context: TaskContext) -> Learned:
        """Keep A's mean over the last epoch, and build the tree anew."""
        if self._mean and not self.task_id_given:
            self._means.append(self._mean)
            self._grow()
        self._context = None
        self._forget_epoch()
        return super().end_task(context)

    def _grow(self) -> None:
        """Build the tree of the tasks so far."""
        directions = self._means[:1] + [
            [now - before for now, before in zip(*pair, strict=True)]
            for pair in zip(self._means[1:], self._means[:-1], strict=True)
        ]
        self._tree = Node.of(range(len(self._means)), directions)

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        kept = {f"task{number}": means for number, means in enumerate(self._means)} | {"epoch": self._mean}
        held = {f"treelora/{kind}/{at}": mean.cpu() for kind, means in kept.items() for at, mean in enumerate(means)}
        epoch = {"step": self._step, "steps": self._steps, "chosen": self._chosen}
        bandit = {"distances": self._distances, "choices": self._choices}
        return {**values, "treelora": {"tasks": len(self._means), **epoch, **bandit}}, tensors | held

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(values, tensors)
        held = values["treelora"]
        kinds = [*(f"task{number}" for number in range(held["tasks"])), "epoch"]
        groups = [under(f"treelora/{kind}/", tensors) for kind in kinds]
        *self._means, mean = ([group[str(at)] for at in range(len(group))] for group in groups)
        self._mean = [part.clone() for part in mean]  # it changes, and what is given may be other processes' too
        self._step, self._steps, self._chosen = held["step"], held["steps"], list(held["chosen"])
        self._distances = [list(row) for row in held["distances"]]
        self._choices = [list(row) for row in held["choices"]]
        if self._means:
            self._grow()
