"""Reading a text that comes without its task: the part that the router sees, and the prompt that it gets.

The accuracy matrix with `eval.instruction=chosen`, an endpoint, `predict` and `evaluate` read a text in the same way.
The router sees the text alone; one that was fitted on prompts sees it without a prompt first, and then in the prompt of
the task that its words select (`Mixture.by_text`), or where the router does not know, of the task with the largest
weight.
The system message of a conversation reaches the router only where it is the instruction that a task was learned with:
then the text is read in that task's prompt from the beginning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import dropwhile
from typing import NamedTuple

import torch
from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone
from raycl.backbone.base import mean_pooled
from raycl.backbone.markup.chat_templates import check
from raycl.bank.manifest import Snapshot
from raycl.data.loader import batch_of, batches_of
from raycl.data.prepare import fit_prompts, fit_sources
from raycl.data.prompts import Prompt
from raycl.data.sources.conversation import (
    has_tool_turns,
    messages_of,
    plain_text,
    routed_turns,
    text_of,
    without_tool_turns,
)
from raycl.errors import BankError, ConversationError
from raycl.routing.router import PromptRouter, Router
from raycl.routing.routers import READS_STATES, routed_text, router_class
from raycl.routing.unknown_texts import UnknownRule
from raycl.types import Batch, Mixture, RouterText, TextCodec

READ_AT_ONCE = 64
"""Texts embedded together where only their means are wanted."""


class PromptReading(NamedTuple):
    """A text as it is read.

    Attributes:
        text: text for the model. routed: text for the router.
        tasks: one of them gives the prompt; None: any task.
        is_chat: both texts stand for conversations (`raycl.data.sources.conversation`).
    """

    text: str
    routed: str
    tasks: tuple[str, ...] | None = None
    is_chat: bool = False

    def for_model(self, prompt: Prompt) -> str:
        """Return the text that a prompt is put around: without a chat template all contents of a conversation.

        Raises:
            ConversationError: the conversation has tools, which only a chat template renders.
        """
        if prompt.chat_template:
            return self.text
        if self.is_chat and has_tool_turns(self.text):
            raise ConversationError(
                "the prompt of this text has no chat template that renders tools: leave tools and their turns out, or "
                "name a model whose template does"
            )
        return self._plain(self.text)

    def for_router(self, prompt: Prompt) -> str:
        """Return the text for a router that reads prompts."""
        return self.routed if prompt.chat_template else self._plain(self.routed)

    def _plain(self, text: str) -> str:
        return plain_text(messages_of(text)) if self.is_chat else text


@dataclass(frozen=True, eq=False)
class TaskPrompts:
    """The tasks of a snapshot with their prompts, and the adapters trained on them.

    Attributes:
        router: router of the snapshot, or its class.
        owners: adapter -> tasks that it was trained on.
        prompts: task -> the prompt of its texts.
        routed_text: the text that the router was fitted on.
        rule: the rule for texts of no learned task.
        user_turns: task -> the user's messages that routers read of an input, see `OpenTask.user_turns`; tasks that
            were not learned from conversations are left out.
    """

    router: Router | type[Router]
    owners: Mapping[str, tuple[str, ...]]
    prompts: Mapping[str, Prompt]
    routed_text: RouterText
    rule: UnknownRule
    user_turns: Mapping[str, int]

    @cached_property
    def has_chats(self) -> bool:
        """Return whether a task was learned from conversations."""
        return any(prompt.chat_template for prompt in self.prompts.values())

    @property
    def by_backbone(self) -> bool:
        """Return whether the router reads texts by the backbone."""
        return bool(READS_STATES & self.router.needs)

    @cached_property
    def needs_task(self) -> bool:
        """Return whether a text alone does not determine its prompt: prompts differ, and no adapter stands for a
        task."""
        is_shared = not self.router.chooses or len(set(self.owners.values())) == 1
        return is_shared and len(set(self.prompts.values())) > 1

    @cached_property
    def _common(self) -> str:
        """A task whose prompt all others share; "" where prompts differ."""
        return next(iter(self.prompts), "") if len(set(self.prompts.values())) == 1 else ""

    @cached_property
    def _by_instruction(self) -> dict[str, tuple[str, ...]]:
        tasks_of: dict[str, tuple[str, ...]] = {}
        for task, prompt in self.prompts.items():
            if instruction := prompt.instruction.strip():
                tasks_of[instruction] = (*tasks_of.get(instruction, ()), task)
        return tasks_of

    def reading(self, text: str, is_chat: bool = False, task: str | None = None) -> PromptReading:
        """Return how a text is read.

        The router sees what it saw in training: of a conversation the user's last messages and the answers between
        them, as many as it read of any task that it may select.

        Args:
            is_chat: it stands for a conversation (`raycl.data.sources.conversation`).
            task: the text's, where it is given: then the router sees all that it saw in training.
        """
        tasks: tuple[str, ...] | None = None if task is None else (task,)
        messages = messages_of(text) if is_chat else ()
        if len(messages) < 2:
            return PromptReading(text, text, tasks, is_chat)
        others = tuple(dropwhile(lambda message: message.role == "system", messages))
        leading = messages[: len(messages) - len(others)]
        instruction = leading[0].content if len(leading) == 1 else ""
        named = self._by_instruction.get(instruction.strip(), ())
        if named and task in (None, *named):
            messages, text, tasks = others, text_of(others), tasks or named
        turns = self.user_turns if task is None else {task: self.user_turns.get(task, 0)}
        most = max(turns.values(), default=0)
        shown = messages if task is not None and most else others
        return PromptReading(text, routed_turns(text_of(shown), max(1, most)), tasks, is_chat)

    def seen(self, reading: PromptReading, task: str = "") -> str:
        """Return what a router of texts sees: of a conversation all contents, where no task was learned from any.

        Args:
            task: the text is read in this task's prompt; "": in none.
        """
        prompt = self.prompts.get(task, Prompt())
        if prompt != Prompt():
            return prompt.written(reading.for_router(prompt))
        return reading.routed if self.has_chats else reading.for_router(Prompt())

    def route(
        self, readings: Sequence[PromptReading], mixture_of: Callable[[Sequence[str]], Mixture]
    ) -> tuple[Mixture, list[str]]:
        """Return the mixture of each text, and the task whose prompt it gets; "": none (`needs_task`, or the text is
        of no learned task).

        Args:
            mixture_of: mixtures of all the texts, each in the prompt of a task ("": in none).
        """
        reads_prompts = self.routed_text == "prompt"
        known = [self._known(reading.tasks) for reading in readings]
        mixture = mixture_of(known if reads_prompts else [""] * len(known))
        if self.needs_task:
            return self.rule.applied(mixture), known
        names = self._largest_of(mixture, readings, known)
        if reads_prompts and not all(known):
            if mixture.by_text is not None:
                names = self._largest_of(mixture.by_text, readings, names)
            names = [known_task or name for known_task, name in zip(known, names, strict=True)]
            mixture = mixture_of(names)
        mixture = self.rule.applied(mixture)  # of a text in the prompt that it is read in
        parts = zip(mixture.bare, readings, names, strict=True)
        return mixture, ["" if bare and reading.tasks is None else name for bare, reading, name in parts]

    def _largest_of(self, mixture: Mixture, readings: Sequence[PromptReading], others: Sequence[str]) -> list[str]:
        """Return the task of each text with the largest weight; that of `others` where none has any."""
        return [
            self.largest({mixture.names[column]: weight for column, weight in row}, reading.tasks) or other
            for row, reading, other in zip(mixture.active(), readings, others, strict=True)
        ]

    def prompt_of(self, task: str, reading: PromptReading, codec: TextCodec) -> Prompt:
        """Return the prompt around a text for the model: its task's, or else the model's own chat template.

        The latter is for conversations, and for all texts where tasks were learned from conversations, so that the bare
        backbone and adapters without a known task read turns as the model was tuned to. It is no prompt where the
        model has no chat template.

        Args:
            task: name of the task; "": none is known.
        """
        if task in self.prompts:
            return self.prompts[task]
        has_turns = (reading.is_chat or self.has_chats) and not codec.needs_labels
        return Prompt(chat_template=codec.chat_template) if has_turns else Prompt()

    def read(
        self,
        batch: Batch,
        readings: Sequence[PromptReading],
        route: Callable[[Batch], Mixture],
        codec: TextCodec,
        snapshot: Snapshot,
    ) -> tuple[Batch, Mixture, list[str]]:
        """Return a batch of texts, each in the prompt that it gets, their mixture, and the task of each prompt.

        Args:
            batch: a batch whose prompts are replaced; it may contain fill-ups.
            route: the mixture of a batch in the prompts and with the texts that a router sees, without tasks.
            snapshot: the snapshot, which has the token limits of its tasks.
        """

        def within(
            names: Sequence[str], prompts: Sequence[Prompt], of: Callable[[PromptReading, Prompt], str]
        ) -> Batch:
            texts = [of(reading, prompt) for reading, prompt in zip(readings, prompts, strict=True)]
            longest = codec.max_source_tokens
            limits = {name: min(snapshot.token_limits(name)[0] or longest, longest) for name in dict.fromkeys(names)}
            ids = fit_prompts(texts, prompts, codec, [limits[name] for name in names])
            shown = [row_ids if row >= 0 else [] for row_ids, row in zip(ids, batch.rows.tolist(), strict=True)]
            fresh = batch_of([row_ids or [codec.pad_id] for row_ids in shown], codec.pad_id).to(batch.source_ids.device)
            return replace(batch, source_ids=fresh.source_ids, source_mask=fresh.source_mask)

        def mixture_of(names: Sequence[str]) -> Mixture:
            prompts = [self.prompts.get(name, Prompt()) for name in names]
            pairs = zip(readings, names, strict=True)
            texts = tuple(reading.routed if self.by_backbone else self.seen(reading, name) for reading, name in pairs)
            seen = within(names, prompts, PromptReading.for_router)
            return route(replace(seen, texts=texts, tasks=("",) * len(batch)))

        mixture, names = self.route(readings, mixture_of)
        prompts = [self.prompt_of(name, reading, codec) for name, reading in zip(names, readings, strict=True)]
        return within(names, prompts, PromptReading.for_model), mixture, names

    def _known(self, tasks: tuple[str, ...] | None) -> str:
        """Return the first of these tasks, if all have the same prompt."""
        if tasks is None:
            return self._common
        return tasks[0] if len({self.prompts.get(task) for task in tasks}) == 1 else ""

    def largest(self, weights: Mapping[str, float], tasks: tuple[str, ...] | None = None) -> str:
        """Return the task with the largest summed weight; "" for the bare backbone.

        Args:
            weights: adapter -> weight. tasks: one of these; None: any.
        """
        return next((task for task in self.shares(weights) if tasks is None or task in tasks), "")

    def shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return task -> summed weight of its adapters, the largest first.

        Args:
            weights: adapter -> weight; those of weight 0 are left out.
        """
        shares: dict[str, float] = {}
        for name, weight in weights.items():
            for task in self.owners[name] if weight else ():
                shares[task] = shares.get(task, 0.0) + weight
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))


def task_prompts(snapshot: Snapshot, rule: UnknownRule) -> TaskPrompts:
    """Return the prompts of a snapshot whose router is not loaded, with its rule for texts of no learned task."""
    owners = {entry.name: entry.tasks for entry in snapshot.adapters}
    prompts = {task.name: Prompt.of(task) for task in snapshot.tasks}
    router = snapshot.router
    text, turns = routed_text(router), user_turns_of(snapshot)
    return TaskPrompts(router_class(router), owners, prompts, text, rule, turns)


def user_turns_of(snapshot: Snapshot) -> dict[str, int]:
    """Return `TaskPrompts.user_turns` of a snapshot."""
    return {task.name: task.user_turns for task in snapshot.tasks if task.user_turns}


def check_templates(snapshot: Snapshot) -> None:
    """Try each chat template of a snapshot, before an answer depends on it.

    Raises:
        BankError: one cannot render a conversation, or takes more than it may.
    """
    for template, system in dict.fromkeys((task.chat_template, task.system) for task in snapshot.tasks):
        try:
            if template:
                check(template, system)
        except ValueError as error:
            raise BankError(
                f"the chat template of snapshot {snapshot.number} ('{' '.join(template[:40].split())}...') {error}; "
                "use another snapshot, or train with another template in backbone.chat_template"
            ) from error


def bare_ids(texts: Sequence[str], codec: TextCodec, limit: int | None) -> list[list[int]]:
    """Return ids of texts as they are read that come without their tasks: without prompts and system messages.

    Args:
        texts: texts, or what stands for conversations. limit: tokens at most; None: those of the codec.
    """
    bare = []
    for text in texts:
        messages = messages_of(without_tool_turns(text))
        has_system = len(messages) > 1 and messages[0].role == "system"
        bare.append(plain_text(messages[1:] if has_system else messages))
    return fit_sources(bare, Prompt(), codec, min(limit or codec.max_source_tokens, codec.max_source_tokens))[0]


@torch.no_grad()
def mean_embeddings(backbone: Backbone, sources: Sequence[Sequence[int]]) -> Tensor:
    """Return `[n, d]`, the mean of the token embeddings of each text, on the model's device; 0 for an empty text."""
    pad_id = backbone.codec.pad_id
    batches = batches_of([ids or [pad_id] for ids in sources], READ_AT_ONCE, pad_id, backbone.device)
    means = [mean_pooled(backbone.embedded(batch.source_ids).float(), batch.source_mask) for batch in batches]
    return torch.cat(means)


def route_batch(
    router: Router, backbone: Backbone, stack: AdapterStack, batch: Batch, tasks: Sequence[str] | None = None
) -> Mixture:
    """Return the mixture of each text of a batch.

    Other texts may be decoded under their mixture meanwhile, which must not affect the states that a router reads.

    Args:
        batch: a batch, with its texts for routers that read them; others rate them as texts of no task by them.
        tasks: tasks of the texts where they are known.

    Raises:
        BankError: the router needs the tasks, or does not know one. RetrievalError: it is of another backbone.
    """
    if not READS_STATES & router.needs:
        return router.route(batch.texts or ("",) * len(batch), tasks)
    (ids_BL, mask_BL), is_deep = batch.routed, "hidden_states" in router.needs
    with stack.mixture_aside():
        embeddings = backbone.hidden_states(ids_BL, mask_BL) if is_deep else backbone.embedded(ids_BL)
        mixture = router.route_embeddings(embeddings, mask_BL, tasks)
        is_rated = mixture.ood_distances is not None or not batch.texts
        if is_rated or not isinstance(router, PromptRouter) or not router.bare:
            return mixture
        return router.bare.rated(mixture, mean_embeddings(backbone, bare_ids(batch.texts, backbone.codec, None)))
