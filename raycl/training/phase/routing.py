"""Routing of evaluated texts by the router that the phase publishes, restored as serving restores it.

The router is kept with the checkpoint at the end of the phase, so that a run that continues there, and a process that
scores beside training, evaluate by the same one. Texts without their tasks' instructions get the prompts that it finds,
as at an endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from raycl.adapters.head import MixedHead
from raycl.bank.manifest import Snapshot
from raycl.bank.tensor_groups import PUBLISHED
from raycl.data.sources.conversation import messages_of
from raycl.errors import RetrievalError
from raycl.generation.task_prompts import PromptReading, TaskPrompts, route_batch, task_prompts
from raycl.methods.base import Learned, Method, under
from raycl.metrics.settings import EvalConfig
from raycl.routing.router import Owners, Router, heads_of_tasks
from raycl.routing.routers import make_router
from raycl.routing.unknown_texts import UnknownRule
from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.records.publish import open_bank
from raycl.types import Batch, Mixture, RouterState, Task


@dataclass(frozen=True)
class PublishedRouter:
    """A phase's router over the adapters of the model that was trained.

    Attributes:
        owners: adapter -> tasks that it was trained on, in the order of learning.
        rule: the rule for texts of no learned task.
    """

    method: Method
    router: Router
    owners: Owners
    rule: UnknownRule = field(default_factory=UnknownRule)

    @staticmethod
    def of(method: Method, done: Checkpoint, settings: EvalConfig | None = None) -> PublishedRouter | None:
        """Return the router of the phase that a checkpoint ends; None: the phase has no adapters.

        Args:
            settings: settings of evaluation; None: all texts are answered alike.

        Raises:
            BankError, RetrievalError: see the opening of a snapshot.
        """
        if not done.router:
            return None
        values = dict(done.router)
        owners = {name: tuple(tasks) for name, tasks in values.pop("owners")}
        state = RouterState(**values, tensors=dict(under(f"{PUBLISHED}/", done.frozen_state)))
        own = method.encoder
        if state.encoder is not None:  # the run's own, wherever it is: nothing that a bank names is loaded
            if own is None or own.fingerprint != state.encoder_sha256:
                raise RetrievalError(
                    f"the router was made with the sentence encoder of hash {state.encoder_sha256[:12]}, and the run "
                    "has another one: name the original in method.encoder"
                )
            state = replace(state, encoder=own.config.model_dump(mode="json"))
        router, rule = make_router(state, owners, () if own is None else (own,)), UnknownRule()
        if settings is not None:
            rule = UnknownRule.of(router, settings.unknown, settings.false_alarms, "this run")
        return PublishedRouter(method, router, owners, rule)

    @torch.no_grad()
    def mixture(self, batch: Batch, task: str | None = None) -> Mixture:
        """Return the mixture of a batch of texts.

        Args:
            task: task of all texts, where it may be given; the newest task replaces one that is not learned yet.
        """
        tasks, stack = None, self.method.stack
        assert stack is not None, "a model without adapters has no router"
        if task is not None:
            known = [owner for owned in self.owners.values() for owner in owned]
            tasks = [task if task in known else known[-1]] * len(batch)
        mixture = route_batch(self.router, self.method.backbone, stack, batch, tasks)
        head = self.method.backbone.head
        if tasks is not None and isinstance(head, MixedHead) and head.rule == "label_count":
            by_task = heads_of_tasks(self.owners)
            mixture = replace(mixture, heads=tuple(by_task[owner] for owner in tasks))
        elif head is not None and self.method.backbone.allowed_labels and mixture.unpruned is not None:
            whole = mixture.unpruned  # an adapter that was pruned may be the only one with an allowed label
            mixture = replace(mixture, names=whole.names, weights=whole.weights)
        return mixture.over({*stack.trainable, *stack.states})


def router_record(learned: Learned, tasks: Sequence[str]) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Return what a checkpoint keeps of a phase's router: JSON-able values and tensors; empty for a model without
    adapters.

    Args:
        tasks: learned so far, which all adapters know that have no owners of their own.
    """
    owners = learned.owners or {name: list(tasks) for name in learned.adapters}
    if not owners:
        return {}, {}
    state = learned.router
    values = {name: getattr(state, name) for name in ("kind", "settings", "encoder", "encoder_sha256", "package")}
    pairs = [[name, list(tasks)] for name, tasks in owners.items()]  # their order counts
    return {**values, "owners": pairs}, {f"{PUBLISHED}/{name}": tensor for name, tensor in state.tensors.items()}


@dataclass(frozen=True)
class TextAlone:
    """Reads texts as an endpoint does that follows a run: by the prompts of its newest snapshot.

    Attributes:
        tasks: tasks of the snapshot.
    """

    context: TrainingContext
    published: PublishedRouter
    snapshot: Snapshot
    tasks: TaskPrompts

    @staticmethod
    def of(context: TrainingContext, published: PublishedRouter, snapshot: Snapshot) -> TextAlone | None:
        """Route by the prompts of the router's snapshot; None: no text is answered by itself.

        Texts have no answers, each comes with its task's id, or nothing chooses among the tasks' prompts.
        """
        method, tasks = context.method, task_prompts(snapshot, published.rule)
        gives_task = method.task_id_given or method.config.needs_task or tasks.needs_task
        return None if context.stream.learns_texts or gives_task else TextAlone(context, published, snapshot, tasks)

    @staticmethod
    def after(
        context: TrainingContext, storage: Storage, done: Checkpoint, published: PublishedRouter | None
    ) -> TextAlone | None:
        """Route by the snapshot that a phase has published; None: it has published none, or see `of`."""
        if published is None or not done.published:
            return None
        return TextAlone.of(context, published, open_bank(context.bank, storage).open(done.published["snapshot"]))

    def differs(self, tasks: Sequence[Task]) -> bool:
        """Return whether texts of these tasks may be read otherwise than in their own tasks' prompts."""
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

    def reading(self, task: Task, text: str) -> PromptReading:
        """Return how a row of a task is read."""
        return self.tasks.reading(text, self.context.stream.is_chat(task))

    def seen(self, task: Task, text: str) -> str:
        """Return what a router that reads texts sees of a row first."""
        return self.tasks.seen(self.reading(task, text))

    def read(self, batch: Batch, task: Task) -> tuple[Batch, Mixture, list[str]]:
        """Return a batch of a task's rows in the prompts that they get, their mixture, and the task of each prompt.

        Args:
            batch: a batch with its texts.
        """
        readings = [self.reading(task, text) for text in batch.texts]
        return self.tasks.read(batch, readings, self.published.mixture, self.context.backbone.codec, self.snapshot)
