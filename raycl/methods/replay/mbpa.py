"""MbPA++: an episodic memory that is replayed sparsely in training, and adapts the model to each text at test.

Training: in every `every`-th step, as many examples of earlier tasks as there are new ones are drawn from the memory
and join the step (100: the paper's 1 %, 100 examples for every 10,000 new ones).
At test, for a text x with the K nearest examples (x_k, y_k) by the Euclidean distance of their keys, L steps of

    d <- momentum d + gradient of ( mean of CE(y_k | x_k) + weight |theta - theta_base|^2 )
    theta <- theta - rate d

from theta = theta_base and d = 0; then x is answered, and theta is theta_base again, bit for bit. The mean is over K
labels; for models that write answers it is over the tokens of all K answers, so that longer answers weigh more.
De Masson d'Autume et al. 2019, "Episodic Memory in Lifelong Language Learning", section 3, eq. 4. Keys are of a frozen
pretrained encoder (`encoder`); for the paper's, BERT's state of the first token, name a sentence-transformers folder
with such pooling and layer=last. `share` of each task's rows are kept (the paper: all, or 10 to 50 % at random).
Where it differs from the paper and from EM-in-LLL, the public code of LAMOL's authors (at 742f6e3: 20 steps of SGD at
0.002 with momentum 0.9 on 32 neighbours, weight 0.001, dropout left out at test):
- The paper and that code make updates of their own of replayed examples; here they join a step, since a method does not
  step.
- Whatever the learner trains is adapted: all weights with `learner=finetune`, as in the paper.
- Replay draws from earlier tasks alone, there from the whole memory, the present task's examples too. Neighbours are of
  all tasks learned so far in both.
TRACE's version (MbPAplusplus.py:208-225) makes L times K backward passes for a text, each on one neighbour, and has the
training optimizer step after them as in training.
What trains while it answers cannot be served as measured, so nothing is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from raycl.backbone import Backbone
from raycl.config import Section
from raycl.data.loader import Collate
from raycl.data.sources.cache import cache_folder
from raycl.data.tokens import HeldRows, TokenColumns
from raycl.errors import ConfigError
from raycl.methods.base import Learned, State, trained_names, under
from raycl.methods.capabilities import LocalAdaptation
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.samples import flat, lengths
from raycl.methods.replay.stored_rows import FIRST, dealt, joined
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.routing.sentence_encoder import EncoderConfig, SentenceEncoder
from raycl.types import Batch, Phase, Task

PARTS = ("source_ids", "source_lengths", "target_ids", "target_lengths", "labels", "keys")


class KeyedRows(HeldRows):
    """Examples of one task.

    Attributes:
        tensors: `PARTS`: ids of all examples one after another and the length of each (int32), `[n]` index in the
            task's labels (-1: none), `[n, c]` keys (float32).
    """

    def __init__(self, task: Task, tensors: Mapping[str, Tensor]) -> None:
        sources, targets = (
            [ids.numpy() for ids in torch.split(tensors[f"{name}_ids"], tensors[f"{name}_lengths"].tolist())]
            for name in ("source", "target")
        )
        super().__init__(task, sources, targets, tensors["labels"].tolist())
        self.tensors = tensors

    @staticmethod
    def of(task: Task, columns: TokenColumns, keys: Tensor) -> KeyedRows:
        """Return a memory of rows of a table and their keys."""
        sources, targets = columns.source_ids, columns.target_ids
        result = (flat(sources), lengths(sources), flat(targets), lengths(targets))
        labels = torch.from_numpy(columns.labels.astype(np.int32))
        return KeyedRows(task, dict(zip(PARTS, (*result, labels, keys.float().clone()), strict=True)))


class ExampleMemory:
    """Examples of all tasks so far with their keys, and those whose keys are nearest to a text's.

    Examples are numbered through all tasks in the order of learning. Keys are of a frozen encoder, so they never
    change.
    """

    def __init__(self) -> None:
        self.entries: dict[str, KeyedRows] = {}
        self._opened: tuple[tuple[int, ...], Collate, Tensor, Tensor] | None = None

    def batch(self, numbers: Sequence[int], backbone: Backbone, texts: bool = False) -> Batch:
        """Return the examples of these numbers; their positions are `-2 - number`.

        Args:
            texts: add empty texts, for methods that read texts; no texts are kept.
        """
        collate, _, _ = self._open(backbone)
        batch = collate(np.array(numbers, dtype=np.int64), len(numbers))
        blank = ("",) * len(batch) if texts else ()
        return replace(batch, rows=FIRST - batch.rows, texts=blank, tasks=blank)

    def nearest(self, key_C: Tensor, count: int, backbone: Backbone) -> list[int]:
        """Return numbers of the examples with the least Euclidean distance between keys, the nearest first.

        `|k|^2 - 2 k.q` orders keys k as their distance to q does, without a difference of all keys. It is rounded at
        the size of the keys, not of their distance: twice as many are found by it, and these are compared directly.
        """
        _, keys_NC, squares_N = self._open(backbone)
        order_N = squares_N - 2 * (keys_NC @ key_C)
        near_M = order_N.topk(min(2 * count, len(order_N)), largest=False).indices.sort().values
        distance_M = (keys_NC[near_M] - key_C).square().sum(1)
        numbers: list[int] = near_M[distance_M.argsort(stable=True)[:count]].tolist()
        return numbers

    def _open(self, backbone: Backbone) -> tuple[Collate, Tensor, Tensor]:
        """Return what batches are made with, the keys of all examples and their squared norms.

        Opened anew where tasks or labels came.
        """
        state = (*map(len, self.entries.values()), len(backbone.label_ids()))
        if self._opened is None or self._opened[0] != state:
            labels = backbone.label_ids() if backbone.codec.needs_labels else None
            collate = Collate(list(self.entries.values()), backbone.codec.pad_id, labels)
            keys_NC = torch.cat([rows.tensors["keys"] for rows in self.entries.values()])
            self._opened = (state, collate, keys_NC, torch.linalg.vector_norm(keys_NC, dim=1).square())
        return self._opened[1:]

    def tensors(self) -> dict[str, Tensor]:
        """Return `memory/<task>/<part>`."""
        return {f"memory/{task}/{part}": rows.tensors[part] for task, rows in self.entries.items() for part in PARTS}

    def values(self) -> list[Any]:
        """Return the task and its labels, in the order of learning."""
        return [[task, rows.task.labels and list(rows.task.labels)] for task, rows in self.entries.items()]

    def take(self, values: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore from what `values` and `tensors` gave."""
        self._opened, self.entries = None, {}
        for name, labels in values:
            held = under(f"memory/{name}/", tensors)
            task = Task(name, None if labels is None else tuple(labels), "")
            self.entries[name] = KeyedRows(task, {part: held[part] for part in PARTS})


class AdaptConfig(Section):
    """Local adaptation to each text at test."""

    steps: int = Field(30, ge=0, description="L, gradient steps on a text's neighbours; 0: the model as it was trained")
    neighbours: int = Field(32, ge=1, description="K, the nearest examples of the memory")
    rate: float = Field(1e-3, gt=0, description="length of a gradient step")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the gradient steps; each text begins without any")
    weight: float = Field(1e-3, ge=0, description="lambda, which pulls the weights back to the trained ones")

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings without effect without a step."""
        if not self.steps:
            yield from ((name, "steps=0") for name in ("neighbours", "rate", "momentum", "weight"))


class MbpaConfig(WrapperConfig):
    """MbPA++: any learner, with a memory that is replayed sparsely and adapts the model to each text at test."""

    name: Literal["mbpa++"] = "mbpa++"
    share: float = Field(1.0, gt=0, le=1, description="share of each task's train rows in the memory; at least one")
    every: int = Field(
        100, ge=0, description="examples of the memory, as many as new ones, join every n-th step; 0: never"
    )
    adapt: AdaptConfig = AdaptConfig()
    encoder: EncoderConfig = EncoderConfig()

    pre_trains: ClassVar[bool] = False
    kept_share = "share"
    unused_in_first_phase = ("every",)
    needs_texts: ClassVar[bool] = True  # they search the memory
    keeps_data: ClassVar[bool] = True

    def extra_passes(self, epochs: int, steps: int) -> float:
        """Return the learner's, and a step in so many has twice the examples."""
        return self.learner.extra_passes(epochs, steps) + (1 / self.every if self.every else 0.0)

    @property
    def sentence_encoder(self) -> EncoderConfig:
        """The encoder of the memory's keys."""
        return self.encoder


class Mbpa(Wrapper):
    """Any learner that trains the same weights in every task, with an episodic memory.

    Attributes:
        memory: examples of all tasks so far, those of the present one too.
        adapted: names of what is adapted to a text.
    """

    Config = MbpaConfig
    needs_shared = "adapters"
    not_served = (
        "method 'mbpa++' adapts its weights to each text before it answers, which serving does not do; it is "
        "evaluated, and nothing of it is published"
    )

    def __init__(self, config: MbpaConfig, backbone: Backbone, seed: int) -> None:
        """Wrap the learner.

        Raises:
            ConfigError: adapters of earlier tasks are frozen.
        """
        super().__init__(config, backbone, seed)
        if self.learner.own_adapters:
            raise ConfigError(
                f"method.learner is {config.learner.name}, which freezes each task's adapters, and mbpa++ adapts "
                "weights that all tasks share: expected a learner such as lora or finetune"
            )
        device = "cuda" if backbone.device.type == "cuda" else "cpu"
        self.encoder: SentenceEncoder = SentenceEncoder(config.encoder, cache_folder(None) / "queries", device)
        self.memory: ExampleMemory = ExampleMemory()
        self.adapted: list[str] = []
        adapt = config.adapt
        if adapt.steps:
            self.local_adaptation = LocalAdaptation(
                adapt.steps, adapt.rate, adapt.momentum, adapt.weight, lambda: self.adapted, self.neighbours_of
            )
        self._earlier = 0
        self._context: TaskContext | None = None

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Write rows of the task to the memory, and replay those of earlier tasks."""
        self.learner.begin_task(phase, context)
        self._context, self.adapted = context, trained_names(self.backbone)
        queries, first = context.queries[phase.index]["train"], 0
        for table in context.tables("train"):
            rows = context.stored_rows(table.task, self.config.share)
            keys = queries[first + torch.from_numpy(rows)]
            self.memory.entries[table.task.name] = KeyedRows.of(table.task, table.columns(rows), keys)
            first += len(table)
        own = {task.name for task in phase.tasks}
        self._earlier = sum(len(rows) for name, rows in self.memory.entries.items() if name not in own)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Add an example of an earlier task to each new row in every n-th step."""
        batch = self.learner.prepare_batch(batch)
        every, context = self.config.every, self._context
        if not every or not self._earlier or context is None or (context.step.index + 1) % every:
            return batch
        numbers = dealt(batch, self._earlier, context.step.seed)
        if not numbers:
            return batch
        stored = self.memory.batch(numbers, self.backbone, bool(batch.texts))
        return joined(batch, stored, self.backbone.codec.pad_id)

    def neighbours_of(self, example: Batch) -> Batch | None:
        """Return the K nearest examples to the one text of a batch; None: the memory is empty."""
        if not self.memory.entries:
            return None
        key = self.encoder.embed(example.texts)[0]
        numbers = self.memory.nearest(key, self.config.adapt.neighbours, self.backbone)
        return self.memory.batch(numbers, self.backbone, texts=True)

    def end_task(self, context: TaskContext) -> Learned:
        """End the learner's task; nothing is published."""
        learned = self.learner.end_task(context) or Learned()
        return Learned(learned.adapters, owners=learned.owners, router=learned.router, not_served=self.not_served)

    def state_dict(self) -> State:
        values, tensors = self.learner.state_dict()
        kept = {"memory": self.memory.values(), "adapted": list(self.adapted)}
        return {**values, **kept}, tensors | self.memory.tensors()

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.memory.take(values["memory"], tensors)
        self.adapted = list(values["adapted"])
        self.learner.load_state_dict(values, tensors)
