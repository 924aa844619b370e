"""SLM: weight increments in slots, chosen and mixed for each text by the keys of its task (section 3 of its paper).

"Scalable Language Model with Generalized Continual Learning", ICLR 2024.
Each task learns m slots: LoRA pairs on the attention output projection without a scale factor, with label-head rows of
their own where the backbone is an encoder, and frozen keys from a frozen sentence encoder. Nothing of earlier tasks is
touched or replayed, and no task id is needed at test. Where the authors' code differs from the paper (choice per
batch, heads picked by the true number of labels, drifting old slots), this follows the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.adapters.head import MixedHead
from raycl.adapters.head import Rule as HeadRule
from raycl.adapters.prompts import MixedPrompts
from raycl.backbone import Backbone
from raycl.backbone.roles import linear_names
from raycl.data.sources.cache import cache_folder
from raycl.errors import ConfigError
from raycl.methods.base import Learned, Method, MethodConfig, packed, phase_labels, under, unpacked
from raycl.methods.trained_adapters import end_training, is_trainable
from raycl.retrieval.encoder import EncoderConfig, SentenceEncoder
from raycl.retrieval.memory_slots.key_maps import newest_rows, plane, similarity
from raycl.retrieval.memory_slots.keys import KeyConfig, check_keys, split_groups
from raycl.retrieval.memory_slots.slots import Kind, SlotRouter
from raycl.retrieval.memory_slots.weights import RetrievalConfig
from raycl.types import Activation, AdapterState, Batch, Mixture, Phase, RouterState


class SlmConfig(MethodConfig):
    """SLM: memory slots selected for each text (sections 3.2 and 4.2, tables 10 and 14, the authors' scripts)."""

    name: Literal["slm"] = "slm"
    rank: int = Field(8, ge=1, description="r, the rank of each slot; the paper: 12 for BERT, 8 for LLaMA")
    a_init_std: float = Field(1.0, gt=0, description="standard deviation of A's initial values; B starts at 0")
    value: Literal["jare", "adapter", "prompt"] = Field(
        "jare",
        description="what a slot stores. jare: weight increments; adapter: bottleneck adapters in parallel to the "
        "targets (the paper's DTKR+Adapter); prompt: a soft prompt (DTKR+Prompt). The last two use "
        "retrieval.rule=vote in the paper, without distance weights",
    )
    prompt_length: int = Field(10, ge=1, description="positions of a slot's soft prompt")
    targets: tuple[str, ...] = Field(
        ("attention.out",), min_length=1, description="roles or regular expressions of linear paths"
    )
    router: Literal["keys", "discriminant", "auto"] = Field(
        "auto",
        description="what selects slots at test; auto: keys or discriminant, whichever routes more dev texts to "
        "their task",
    )
    train_scope: Literal["own", "seen", "all"] = Field(
        "own",
        description="slots that compete while a task is trained. own: the task's; seen: those of all tasks so "
        "far; all: those of the whole stream, as in the released BERT code, which reads texts of "
        "later tasks",
    )
    value_layout: Literal["shared", "per_group"] = Field(
        "shared", description="shared: one value per slot; per_group: one value per sub-key"
    )
    head_rule: HeadRule = Field(
        "probability",
        description="how label heads of an encoder-only backbone are mixed; label_count: as released, one head "
        "for each number of labels, chosen by the text's own task (it leaks the task id)",
    )
    keys: KeyConfig = KeyConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    encoder: EncoderConfig = EncoderConfig()

    label_head: ClassVar[tuple[str, ...]] = ("head_rule",)

    def idle(self) -> Iterator[tuple[str, str]]:
        """What slots of another kind hold."""
        others = ("rank", "a_init_std", "targets") if self.value == "prompt" else ("prompt_length",)
        yield from ((name, f"value={self.value}") for name in others)

    @property
    def needs_task(self) -> bool:
        """Where `retrieval.task_id` chooses the slots, or the task picks the label head."""
        return self.retrieval.task_id or self.head_rule == "label_count"

    @property
    def fits_ahead(self) -> bool:
        """Keys of all tasks, where all compete."""
        return self.train_scope == "all"


class Slm(Method):
    """Slots over a frozen backbone."""

    Config = SlmConfig
    own_adapters: ClassVar[bool] = True

    def __init__(self, config: SlmConfig, backbone: Backbone, seed: int) -> None:
        """Attach the stack.

        Raises:
            RetrievalError: sizes of keys and encoder that do not fit. ConfigError: settings that contradict each other.
        """
        super().__init__(config, backbone, seed)
        check_keys(config.keys, config.retrieval.top_k)
        if config.value_layout == "per_group" and config.retrieval.rule != "group_union":
            raise ConfigError("method.value_layout=per_group needs method.retrieval.rule=group_union")
        device = "cuda" if backbone.device.type == "cuda" else "cpu"
        self._encoder = SentenceEncoder(config.encoder, cache_folder(None) / "queries", device)
        split_groups(torch.zeros(1, self._encoder.width), config.keys.groups)
        paths = [] if config.value == "prompt" else linear_names(backbone.model, config.targets)
        activation: Activation = "relu" if config.value == "adapter" else ""
        self.stack: AdapterStack = AdapterStack(backbone.model, paths, activation=activation)
        if config.value == "prompt":
            width = int(backbone.model.get_input_embeddings().weight.shape[1])
            backbone.prefix = MixedPrompts(self.stack, width)
        per_group = config.value_layout == "per_group"
        kind: Kind = "discriminant" if config.router == "discriminant" else "keys"
        self.router = SlotRouter(kind, config.keys.groups, config.retrieval, per_group)
        self._ahead = SlotRouter(kind, config.keys.groups, config.retrieval, per_group)
        self.fits_ahead = config.fits_ahead
        self._learned: dict[str, AdapterState] = {}
        self._task = ""
        if backbone.head is not None:
            backbone.head = MixedHead(self.stack, int(backbone.model.config.hidden_size), config.head_rule)

    @property
    def encoder(self) -> SentenceEncoder:
        """The frozen sentence encoder."""
        return self._encoder

    def study(self, phase: Phase, queries_BC: Tensor, dev_BC: Tensor) -> None:
        """The preparation stage: the task's keys from its texts, without labels."""
        router = self._ahead if self.fits_ahead else self.router
        router.fit(phase.name, queries_BC, self.config.keys, self.seed + phase.index)
        router.hold_out(phase.name, dev_BC)

    def summary(self) -> dict[str, Any]:
        """How well each router finds the tasks so far, in percent of dev texts, and which one is used."""
        told = self.task_id_given or self.config.retrieval.task_id
        return {
            "router": "task" if told else self.router.kind,
            "found": self.router.dev_accuracy(),
            "novelty": self.router.novelty(),
            "truncated_queries": self._encoder.truncated,
            "key_similarity": similarity(self.router),
            "slot_similarity": newest_rows(self.router),
            "key_plane": plane(self.router, self.seed),
        }

    def begin_task(self, phase: Phase, resumed: bool) -> None:
        """The task's own slots are live; backbone, keys and all earlier slots are frozen."""
        if not resumed:
            if self.fits_ahead:
                self.router.take(phase.name, self._ahead)
            self._begin(phase.name, phase_labels(phase))
        head = self.backbone.head
        frozen = "head." if isinstance(head, MixedHead) and head.frozen else "-"
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(is_trainable(name, parameter) and not name.startswith(frozen))

    def _begin(self, task: str, labels: list[str]) -> None:
        std = self.config.a_init_std
        ranks = dict.fromkeys(self.router.adapters(task), self.config.rank)
        torch.manual_seed(self.seed + len(self.router.tasks))
        self.stack.begin_training(ranks, 1.0, partial(_normal, std=std))
        self._task = task
        if isinstance(self.backbone.prefix, MixedPrompts):
            words = self.backbone.model.get_input_embeddings().weight.detach()
            rows = torch.randint(len(words), (len(ranks), self.config.prompt_length)).to(words.device)
            self.backbone.prefix.begin_training(words[rows])
        if isinstance(self.backbone.head, MixedHead):
            self.backbone.head.begin_training(labels, self._head_for(labels))

    def _head_for(self, labels: Sequence[str]) -> AdapterState | None:
        """A slot whose label head is taken over: the first one with so many labels."""
        if self.config.head_rule != "label_count":
            return None
        return next((state for state in self._learned.values() if len(state.labels) == len(labels)), None)

    def activate(self, batch: Batch) -> AbstractContextManager[None]:
        """As every method; rule `label_count` also says whose head answers."""
        head = self.backbone.head
        if isinstance(head, MixedHead) and head.rule == "label_count":
            tasks = [self._task or self._learned_as(task) for task in batch.tasks]
            head.head_adapters = tuple(self.router.adapters(task)[0] for task in tasks)
        return super().activate(batch)

    def _learned_as(self, task: str) -> str:
        """Whose slots know a task: its own, or where all tasks are one stage, that one's; fill-ups have none."""
        return task if task in self.router.tasks else self.router.tasks[-1]

    def route(self, batch: Batch) -> Mixture:
        """By each text's query; while a task is trained, among its own slots (or those of all tasks so far)."""
        queries = self._encoder.embed(batch.texts)
        if self._task and self.fits_ahead:
            return self._that_exist(self._ahead.route(queries))
        if self._task:
            return self.router.route(queries, [self._task] * len(batch) if self.config.train_scope == "own" else None)
        if self.task_id_given or self.config.retrieval.task_id:
            return self.router.route(queries, [task or self.router.tasks[-1] for task in batch.tasks])
        return self.router.route(queries)

    def _that_exist(self, mixture: Mixture) -> Mixture:
        """Slots of tasks to come say nothing, yet they took their share of the weight."""
        known = self._learned.keys() | self.stack.trainable.keys()
        kept = [column for column, name in enumerate(mixture.names) if name in known]
        return Mixture(tuple(mixture.names[column] for column in kept), mixture.weights[:, kept])

    def end_task(self, phase: Phase, tensors: Mapping[str, Tensor]) -> Learned:
        """Slots become resident and never change again; they go to the bank with their head rows."""
        states = end_training(self.backbone, self.stack, tensors)
        self._task = ""
        self._keep(states)
        if self.config.router == "auto":
            self.router.select()
        return Learned(dict(states))

    def _keep(self, states: Mapping[str, AdapterState]) -> None:
        self._learned |= states
        for name, state in states.items():
            self.stack.load(name, state)

    def learned_names(self) -> list[str]:
        """The live slots; none between tasks."""
        if not self._task:
            return []
        parameters = self.backbone.named_parameters()
        return [name for name, parameter in parameters if parameter.requires_grad and is_trainable(name, parameter)]

    def router_state(self) -> RouterState:
        """Keys, statistics, rules and encoder."""
        settings = self.router.settings()
        settings["retrieval"]["task_id"] = self.task_id_given or self.config.retrieval.task_id
        settings["head_rule"] = self.config.head_rule
        return RouterState(
            self.router.kind,
            settings,
            self.router.tensors(),
            self.config.encoder.model_dump(mode="json"),
            self._encoder.fingerprint,
        )

    def frozen_state(self) -> dict[str, Tensor]:
        """Slots of earlier tasks and all keys."""
        studied = self._ahead if self.fits_ahead else self.router
        found = {f"router/{name}": tensor for name, tensor in studied.tensors().items()}
        found |= {f"dev/{task}": queries for task, queries in studied.dev.items()}
        return found | packed(self._learned)

    def state_dict(self) -> dict[str, Any]:
        """Label rows, the router's settings, and which task is being learned."""
        head = self.backbone.head
        trainable = list(head.trainable_labels) if isinstance(head, MixedHead) else []
        learned = {name: list(state.labels) for name, state in self._learned.items()}
        router = {"kind": self.router.kind, "settings": self.router.settings()}
        own = {"task": self._task, "live_labels": trainable, "learned": learned, "router": router}
        own["ahead"] = self._ahead.settings()["tasks"]
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any], frozen_state: Mapping[str, Tensor]) -> None:
        """Keys and slots of earlier tasks as they were; the live slots in shape."""
        super().load_state_dict(state, frozen_state)
        router = RouterState(state["router"]["kind"], state["router"]["settings"])
        self.router = _restored(router, frozen_state)
        self._ahead = _restored(replace(router, settings={**router.settings, "tasks": state["ahead"]}), frozen_state)
        self._keep(unpacked(state["learned"], frozen_state, 1.0, self.stack.activation))
        if state["task"]:
            self._begin(state["task"], state["live_labels"])


def _restored(state: RouterState, frozen_state: Mapping[str, Tensor]) -> SlotRouter:
    router = SlotRouter.restored(replace(state, tensors=under("router/", frozen_state)))
    for task in router.tasks:
        router.hold_out(task, frozen_state[f"dev/{task}"])
    return router


def _normal(low: Tensor, outputs: int, std: float) -> None:
    """A from a normal distribution (the released code; most others draw Kaiming-uniform)."""
    torch.nn.init.normal_(low, std=std)
