"""Texts without their tasks' instructions: the prompt and the mixture of each are the router's, as at an endpoint.

What it does not know: answers, scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raycl.bank.manifest import Snapshot
from raycl.data.conversation import messages_of
from raycl.generation.task_prompts import Reading, TaskPrompts, task_prompts
from raycl.storage import Storage
from raycl.training.records.publish import open_bank
from raycl.training.training_context import TrainingContext
from raycl.types import Batch, Mixture, Task


@dataclass(frozen=True)
class TextAlone:
    """Reads texts as an endpoint does that follows a run: by the prompts of its newest snapshot.

    Attributes:
        tasks: of the snapshot.
    """

    context: TrainingContext
    snapshot: Snapshot
    tasks: TaskPrompts

    @staticmethod
    def of(context: TrainingContext, snapshot: Snapshot) -> TextAlone | None:
        """By the router of a snapshot; None: no text is answered by itself.

        Texts have no answers, each comes with its task's id, or nothing chooses among the tasks' prompts.
        """
        method, tasks = context.method, task_prompts(snapshot)
        gives_task = method.task_id_given or method.config.needs_task or tasks.needs_task
        return None if context.stream.learns_texts or gives_task else TextAlone(context, snapshot, tasks)

    @staticmethod
    def after(context: TrainingContext, storage: Storage, published: Mapping[str, Any]) -> TextAlone | None:
        """By the router of the snapshot that a phase has published; None: it has published none, or see `of`."""
        if not published:
            return None
        return TextAlone.of(context, open_bank(context.bank, storage).open(published["snapshot"]))

    def differs(self, tasks: Sequence[Task]) -> bool:
        """Whether texts of these tasks may be read otherwise than in their own tasks' prompts."""
        own = {self.context.stream.prompt(task, self.context.backbone.codec) for task in tasks}
        if len(own | set(self.tasks.prompts.values())) > 1:
            return True
        return bool(self.tasks.router.needs) and any(map(self._has_system_messages, tasks))

    def _has_system_messages(self, task: Task) -> bool:
        stream, settings = self.context.stream, self.context.evaluation
        if not stream.is_chat(task):
            return False
        table = stream.scored(task, settings.split, self.context.backbone.codec, settings.subsample)
        return any(messages_of(text)[0].role == "system" for text in table.texts(range(len(table))))

    def reading(self, text: str, task: Task) -> Reading:
        """How a row of a task is read."""
        return self.tasks.reading(text, self.context.stream.is_chat(task))

    def seen(self, text: str, task: Task) -> str:
        """What a router sees of a row that reads texts."""
        return self.tasks.seen(self.reading(text, task))

    def read(self, batch: Batch, task: Task) -> tuple[Batch, Mixture]:
        """A batch of a task's rows in the prompts that they get, and their mixture.

        Args:
            batch: with its texts.
        """
        readings = [self.reading(text, task) for text in batch.texts]
        return self.tasks.read(batch, readings, self._route, self.context.backbone.codec, self.snapshot)

    @torch.no_grad()
    def _route(self, batch: Batch) -> Mixture:
        mixture = self.context.method.route(batch)
        assert mixture is not None, "a snapshot has adapters"
        return mixture
