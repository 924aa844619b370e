"""Base class of methods with one adapter that all tasks train in turn: a LoRA, a bottleneck adapter or a soft prompt.

The adapter is active for every text with weight 1, the backbone is frozen, and the label head of encoder-only backbones
is trained with it. Where tasks begin and end need not be known, and no task id is needed at test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from raycl.adapters import AdapterStack
from raycl.adapters.soft_prompts import MixedPrompts, formed
from raycl.methods.base import Learned, Method, phase_labels, under
from raycl.methods.context import TaskContext
from raycl.methods.trained_adapters import is_trainable
from raycl.types import Batch, Mixture, Phase


class SingleAdapter(Method):
    """The frozen backbone with one adapter that every task overwrites.

    Subclasses attach the stack and begin its training in their constructor.

    Class attributes:
        adapter: name of the one adapter.
    """

    adapter: ClassVar[str]
    stack: AdapterStack

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Adapter and label head are trained, the backbone is frozen."""
        self.backbone.learn_labels(phase_labels(phase))
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(is_trainable(name, parameter))

    def route(self, batch: Batch) -> Mixture:
        return Mixture.same({self.adapter: 1.0}, len(batch))

    def end_task(self, context: TaskContext) -> Learned:
        """Return the adapter with the label head."""
        tensors, head = context.parameters, self.backbone.head
        state = self.stack.trainable_states(tensors)[self.adapter]
        if isinstance(self.backbone.prefix, MixedPrompts):
            state = replace(state, prompt=formed(under("prefix.", tensors))[0].clone())
        if head is not None and head.labels:
            labels = tuple(head.labels)
            state = replace(state, labels=labels, head_weight=tensors["head.weight"], head_bias=tensors["head.bias"])
        return Learned({self.adapter: state})
