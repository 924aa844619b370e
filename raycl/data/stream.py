"""A stream: the ordered tasks of a run, checked, cached, and given out as token tables.

All errors in data are found here, in the driver, before any worker starts. Workers that open the same config again read
the same rows from the node's cache.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from raycl.data import prompts
from raycl.data.benchmarks import builtin
from raycl.data.prepare import Chosen, TokenLimits, check_codec, fit_targets, prepare
from raycl.data.prompts import Prompt
from raycl.data.resolve import StreamPlan, TaskPlan, resolve
from raycl.data.selection import carve_dev, carve_test, draw_groups, per_class, pick_reference, sample
from raycl.data.settings import ColumnNames, StreamConfig, TaskSpec
from raycl.data.sources.cache import Indices, cache_folder, key_of
from raycl.data.sources.conversation import (
    last_exchange,
    messages_of,
    text_of,
    user_turns,
)
from raycl.data.sources.ingest import RawRows, ingest, ingest_pairs
from raycl.data.text_objectives import TextObjective, text_objective
from raycl.data.tokens import Split, TokenTable
from raycl.errors import ConfigError, DataError, counted
from raycl.types import PromptName, Task, TextCodec

__all__ = ["ColumnNames", "Stream", "StreamConfig", "TaskSpec", "open_stream"]

log: logging.Logger = logging.getLogger(__name__)

BUILTIN_TRAIN_ROWS = 320
BUILTIN_TEST_ROWS = 150
"""The number of test rows of a builtin task unless the config sets it."""

READ = 1024
"""Rows that are read at once."""

READ_WHOLE = 0.95
"""The share of a task's conversations that routers read whole."""


@dataclass(frozen=True)
class OpenTask:
    """A task whose rows are in the cache."""

    task: Task
    plan: TaskPlan
    raws: Mapping[str, RawRows]

    @property
    def definition(self) -> str:
        """The instruction of the prompt, which may be empty."""
        if self.plan.definition is not None:
            return self.plan.definition
        return next(iter(self.raws.values())).definition

    @property
    def is_chat(self) -> bool:
        """Return whether its inputs are conversations."""
        if self.plan.recorded is not None:
            return self.plan.recorded.user_turns > 0
        return any(raw.is_chat for raw in self.raws.values())

    @cached_property
    def user_turns(self) -> int:
        """Return how many of the user's last messages routers read; 0: inputs are no conversations.

        It is what `READ_WHOLE` of the train rows have at most, so that a few long conversations do not let routers read
        turns of another task.
        """
        if self.plan.recorded is not None:
            return self.plan.recorded.user_turns
        if not self.is_chat:
            return 0
        raw = self.raws.get("train") or next(iter(self.raws.values()))
        rows, columns = range(raw.count), raw.open()
        batches = (columns.values("text", rows[start : start + READ]) for start in rows[::READ])
        counts = sorted(user_turns(text) for texts in batches for text in texts)
        return max(1, counts[math.ceil(READ_WHOLE * len(counts)) - 1]) if counts else 1


@dataclass(frozen=True)
class Stream:
    """An ordered list of tasks with their rows.

    Attributes:
        name: name of the benchmark, or the configured one.
        tasks: the tasks in the order in which they arrive.
        unseen: tasks that are never trained, evaluated once after the last of `tasks`.
        notes: differences from the configuration, and row counts, as text.
        config: its config. cuts: what is cut of each task's rows, see `raycl.data.lengths.measure_cuts`.
    """

    name: str
    tasks: tuple[Task, ...]
    unseen: tuple[Task, ...]
    notes: list[str]
    config: StreamConfig = field(repr=False)
    _seed: int = field(repr=False)
    _open: Mapping[str, OpenTask] = field(repr=False)
    _cache: Path = field(repr=False)
    cuts: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def token_limits(self) -> tuple[int, int]:
        """Most tokens of a source and of a target of any task."""
        return self.config.token_limits

    def limits(self, task: Task, codec: TextCodec) -> TokenLimits:
        """Return most tokens of a source and of a target of a task."""
        source, target = self.config.limits_of(task.name)
        return TokenLimits(min(source, codec.max_source_tokens), min(target, codec.max_target_tokens))

    def table(self, task: Task, split: Split, codec: TextCodec, limits: TokenLimits | None = None) -> TokenTable:
        """Return the tokenised rows of one split, from the node's cache if they are there.

        Args:
            limits: token limits; None: the task's own.

        Raises:
            DataError: the split has no rows, or the codec cannot take the task.
            ConfigError: the prompt leaves no room for text.
        """
        chosen = self._chosen(task, split)
        limits = limits or self.limits(task, codec)
        return prepare(task, split, chosen, self.prompt(task, codec), codec, limits, self._cache)

    def answer_ids(self, task: Task, answers: Sequence[str], codec: TextCodec) -> list[list[int]]:
        """Return ids of answers, written and cut as the task's rows are; empty lists for encoder-only backbones."""
        prompt, limit = self.prompt(task, codec), self.limits(task, codec).target
        return fit_targets([""] * len(answers), answers, prompt, codec, limit)[0]

    def has_data(self, task: Task) -> bool:
        """Return whether the task has rows; a learned task whose data is out of reach has none."""
        return bool(self._open[task.name].raws)

    def is_chat(self, task: Task) -> bool:
        """Return whether the task's texts stand for conversations."""
        return self._open[task.name].is_chat

    def user_turns(self, task: Task) -> int:
        """Return how many of the user's last messages routers read of a task; 0: inputs are no conversations."""
        return self._open[task.name].user_turns

    def source(self, task: Task, split: Split) -> RawRows | None:
        """Return the rows that a split is taken from, which for carved splits are those of train; None: it has none."""
        raws = self._open[task.name].raws
        return raws.get(split) or raws.get("train")

    def unread_dev(self, task: Task) -> str:
        """Return the address of a dev file of the task that is not read, since `stream.dev` is not file; "": none."""
        return self._open[task.name].plan.unread_dev

    def carves_test(self, task: Task) -> bool:
        """Return whether test rows are taken from the task's one file."""
        raws = self._open[task.name].raws
        return "train" in raws and "test" not in raws

    @property
    def learns_texts(self) -> bool:
        """Return whether texts themselves are learned, and not their answers."""
        return self.config.objective != "answer"

    def text_objective(self, codec: TextCodec, seed: int) -> TextObjective | None:
        """Return how texts become batches where they themselves are learned; None where their answers are."""
        return text_objective(self.config.objective, codec, self.config.mask_share, seed)

    def stored(self, task: Task, share: float = 1.0, limit: int | None = None) -> Indices:
        """Return rows of the task's train table that are kept for later, ascending: `max(1, floor(share * rows))` of
        them.

        SAPT's count: 2 % (appendix C), rounded as in the files released with its code. The same on every machine.
        Rows that belong together are kept together: one group at least, then at most that many rows.

        Args:
            limit: the most rows.
        """
        rows = self.rows(task, "train")
        wanted = max(1, int(round(share * len(rows), 9)))
        if not len(rows):
            return rows
        return draw_groups(
            self._seed, task.name, "stored", self._groups(task, "train", rows), min(wanted, limit or wanted)
        )

    def _groups(self, task: Task, split: Split, rows: Indices) -> Indices:
        """Return `[len(rows)]` number of each one's group among those of `rows`, which are of the split's source."""
        groups = self._open[task.name].raws[split].groups[rows]
        return np.unique(groups, return_inverse=True)[1]

    def check(self, codec: TextCodec) -> None:
        """Raise what `table` would raise because of the codec, for all tasks, without reading rows.

        Raises:
            DataError, ConfigError: see `table`.
        """
        for task in (*self.tasks, *self.unseen):
            check_codec(task, self.prompt(task, codec), codec, self.limits(task, codec))

    def instruction(self, task: Task, codec: TextCodec) -> str:
        """Return the instruction in the prompts of `task`; "" where they have none."""
        return "" if self._open[task.name].plan.recorded is not None else self.prompt(task, codec).instruction

    def takes_template(self, task: Task, codec: TextCodec) -> bool:
        """Return whether a task of the user's own gets the model's chat template, since no setting names a prompt."""
        is_own = self._open[task.name].plan.is_own and not self.learns_texts
        return self.config.prompt == "auto" and is_own and bool(codec.chat_template) and not codec.needs_labels

    def prompt(self, task: Task, codec: TextCodec, instruction: str | None = None) -> Prompt:
        """Return the template around the inputs of `task`.

        Args:
            instruction: replaces the task's own.
        """
        if self.learns_texts:
            return Prompt()
        opened = self._open[task.name]
        if opened.plan.recorded is not None:
            return Prompt.of(opened.plan.recorded)
        name: PromptName = self.config.prompt
        if name == "auto":
            is_chat = opened.is_chat or self.takes_template(task, codec)
            name = "plain" if codec.needs_labels else "chat" if is_chat else opened.plan.prompt
        definition = opened.definition if instruction is None else instruction
        if name == "chat" and not codec.chat_template:
            raise ConfigError(
                f"task '{task.name}' needs a chat template and the tokenizer of the backbone has none: choose a "
                "backbone that was tuned on conversations, or set backbone.chat_template to a Jinja file or to chatml"
            )
        if name == "chat":
            lists = self.config.list_labels and not codec.needs_labels and not opened.is_chat
            instruction = prompts.naming_labels(definition, task.labels or ()) if lists else definition
            return prompts.chat(instruction, codec.chat_template, self.config.instruction_turn)
        published = {"superni": prompts.superni, "long": prompts.long, "llama2_chat": prompts.llama2_chat}
        if name in published:
            return published[name](definition)
        plan = opened.plan
        if name == "trace":
            return prompts.trace(definition, plan.around)
        if name == "olora":
            return prompts.olora(definition, task.labels, plan.group, plan.dataset, self.config.prompt_names)
        return Prompt()

    def with_shots(self, task: Task, count: int, codec: TextCodec) -> tuple[Prompt, TokenLimits]:
        """Return the prompt with so many train rows as examples, drawn by the seed, and the limits of texts in it.

        An example keeps the beginning of its text, a conversation its last message of the user and what came of it.
        """
        prompt, limits = self.prompt(task, codec), self.limits(task, codec)
        rows = sample(self._seed, task.name, "shots", self.rows(task, "train"), count)
        raw = self._open[task.name].raws["train"].open()
        template = len(prompt.encode([""], codec)[0])
        texts = raw.values("text", rows)
        if self.is_chat(task):
            texts = [text_of(last_exchange(messages_of(text))) for text in texts]
        shots = [
            (codec.clip(text, limits.source - template), references[0])
            for text, references in zip(texts, raw.values("references", rows), strict=True)
        ]
        whole = replace(prompt, shots=tuple(shots))
        examples = len(whole.encode([""], codec)[0]) - template
        return whole, replace(limits, source=limits.source + examples)

    def scored(self, task: Task, split: Split, codec: TextCodec, subsample: int | None, shots: int = 0) -> TokenTable:
        """Return the rows that evaluation scores: all of the split, or a sample drawn by the seed.

        Args:
            shots: examples in front of each text.

        Raises:
            DataError: see `table`.
        """
        if shots:
            prompt, limits = self.with_shots(task, shots, codec)
            table = prepare(task, split, self._chosen(task, split), prompt, codec, limits, self._cache)
        else:
            table = self.table(task, split, codec)
        rows = np.arange(len(table))
        drawn = sample(self._seed, task.name, f"{split} scored", rows, subsample)
        return table if len(drawn) == len(rows) else table.part(drawn)

    def rows(self, task: Task, split: Split) -> Indices:
        """Return which rows of the split's source are used, ascending (0-based); the same on every machine."""
        raws, config, seed = self._open[task.name].raws, self.config, self._seed
        if not raws:
            return np.arange(0)
        pool, test = self._parted(task)
        if split == "test":
            return sample(seed, task.name, split, test, config.test_rows)
        if "train" not in raws:
            return np.arange(0)
        if "dev" in raws:
            dev = np.arange(raws["dev"].count)
            if split == "train":
                return self._limited(task, pool)
            if config.dev_per_class is None:
                return sample(seed, task.name, split, dev, config.dev_rows)
            return per_class(seed, task.name, dev, raws["dev"].label_codes(dev), config.dev_per_class, "dev")
        if config.dev_per_class is not None:
            dev = per_class(seed, task.name, pool, raws["train"].label_codes(pool), config.dev_per_class, "dev")
            groups = self._groups(task, "train", pool)
            others = pool[~np.isin(groups, groups[np.isin(pool, dev)])]
            return dev if split == "dev" else self._limited(task, others)
        limit = len(pool) if config.dev_rows is None else config.dev_rows
        groups = self._groups(task, "train", pool)
        train, carved = carve_dev(seed, task.name, len(pool), config.dev_fraction, limit, groups)
        return pool[carved] if split == "dev" else self._limited(task, pool[train])

    def _parted(self, task: Task) -> tuple[Indices, Indices]:
        """Return rows for train and dev, and rows for test, each in its source."""
        raws, fraction = self._open[task.name].raws, self.config.test_fraction
        if "test" in raws:
            return np.arange(raws["train"].count if "train" in raws else 0), np.arange(raws["test"].count)
        assert fraction is not None, "a task without test rows of its own takes them from train"
        return carve_test(self._seed, task.name, raws["train"].count, fraction, raws["train"].groups)

    def _limited(self, task: Task, train: Indices) -> Indices:
        config = self.config
        if config.per_class is not None:
            codes = self._open[task.name].raws["train"].label_codes(train)
            return per_class(self._seed, task.name, train, codes, config.per_class)
        limit = config.train_rows_of(task.name)
        if limit is None and not self._open[task.name].plan.files:
            limit = BUILTIN_TRAIN_ROWS
        return sample(self._seed, task.name, "train", train, limit)

    def _chosen(self, task: Task, split: Split) -> Chosen:
        raws, rows = self._open[task.name].raws, self.rows(task, split)
        if not raws:
            raise DataError(
                f"the data of learned task '{task.name}' is out of reach: restore it, or leave the task out"
            )
        if not len(rows):
            raise DataError(
                f"task '{task.name}' has no {split} rows: dev_fraction {self.config.dev_fraction} of its train rows "
                "is none, or it comes without train rows; raise dev_fraction or give more rows"
            )
        raw = self.source(task, split)
        assert raw is not None, "a split with rows has a source"
        if self.config.references == "first":
            return Chosen(raw, rows)
        counts = np.array([len(names) for names in raw.open().values("references", rows)], dtype=np.int64)
        return Chosen(raw, rows, pick_reference(self._seed, task.name, split, counts))


def open_stream(config: StreamConfig, seed: int) -> Stream:
    """Read and check every row of every split once; later calls on the same node find them in its cache.

    Args:
        seed: seed of the dev split, sampling and generated rows.

    Raises:
        ConfigError: settings that name no stream or contradict each other.
        DataError: a file, row or label that cannot be used; MissingTasksError: tasks that are not on disk.
    """
    cache = cache_folder(config.cache_dir)
    plan = resolve(config)
    tasks = {task.name: _open_task(task, config, seed, cache) for task in plan.tasks}
    unseen = {task.name: _open_task(task, config, seed, cache) for task in plan.unseen}
    for open_task in tasks.values():
        for key, other in (("per_class", "train_rows"), ("dev_per_class", "dev_rows")):
            if getattr(config, key) is not None and open_task.task.labels is None:
                raise ConfigError(
                    f"{key} is {getattr(config, key)}, but the answers of task '{open_task.task.name}' are free text: "
                    f"use {other}"
                )
    opened_tasks = tasks | unseen
    if config.group and not any(raw.names_groups for task in opened_tasks.values() for raw in task.raws.values()):
        # rows that belong together would be both trained on and tested
        raise ConfigError(
            f"stream.group is '{config.group}', which no row of {', '.join(opened_tasks)} has: "
            "expected a column of at least one task, correct the name or leave it out"
        )
    ordered, never = (tuple(open_task.task for open_task in opened.values()) for opened in (tasks, unseen))
    stream = Stream(plan.name, ordered, never, [], config, seed, opened_tasks, cache)
    stream.notes.extend(_notes(stream, plan, config))
    return stream


def _open_task(plan: TaskPlan, config: StreamConfig, seed: int, cache: Path) -> OpenTask:
    raws: dict[str, RawRows] = {}
    if plan.recorded is not None:
        return OpenTask(Task(plan.name, plan.recorded.labels, plan.recorded.metric, config.objective), plan, raws)
    reading = plan.reading
    for split in ("train", "dev", "test"):
        if plan.files and split in plan.files:
            raws[split] = ingest(plan.files[split], reading, cache)
            reading = replace(reading, labels=raws[split].labels)
        elif not plan.files and split != "dev":
            raws[split] = _generate(plan, split, config, seed, cache)
    labels = next(iter(raws.values())).labels if config.objective == "answer" else None
    long = [label for label in labels or () if not re.fullmatch(r"\w+", label)] if config.answers == "words" else []
    if config.answers == "words" and (long or len(set(labels or ())) < len(labels or ())):
        what = f"label '{long[0]}' is not one word" if long else "several labels have the same word"
        raise ConfigError(
            f"stream.answers is words, and of task '{plan.name}' {what}: give it a word for each of its labels in "
            "'words', for example words={'Science & Mathematics': science}"
        )
    metric = plan.metric or ("rouge_l" if labels is None else "exact_match")
    return OpenTask(Task(plan.name, labels, metric, config.objective, plan.type), plan, raws)


def _generate(plan: TaskPlan, split: str, config: StreamConfig, seed: int, cache: Path) -> RawRows:
    """Return rows of a builtin task: enough for the train rows and the dev rows that will be carved from them."""
    if split == "test":
        count = config.test_rows or BUILTIN_TEST_ROWS
    else:
        count = math.ceil((config.train_rows_of(plan.name) or BUILTIN_TRAIN_ROWS) / (1 - config.dev_fraction))
    labels = builtin.labels(plan.name)
    key = key_of("builtin", builtin.fingerprint(), plan.name, split, count, seed, labels)
    return ingest_pairs(builtin.rows(plan.name, split, count, seed), f"builtin task {plan.name}", key, labels, cache)


def _notes(stream: Stream, plan: StreamPlan, config: StreamConfig) -> list[str]:
    notes = list(plan.notes)
    unreachable = [name for name, task in stream._open.items() if task.plan.recorded is not None]
    if unreachable:
        notes.append(f"learned earlier and not evaluated, since their data is out of reach: {', '.join(unreachable)}")
    if config.dev == "file":
        notes.append("dev comes from files; where they equal the test files, results chosen by dev are test-selected")
    for task in stream._open.values():
        if stream.carves_test(task.task):
            count, rows = len(stream._parted(task.task)[1]), task.raws["train"].count
            notes.append(f"{task.task.name}: comes as one file, {count:,} of its {rows:,} rows are set aside as test")
        for split, raw in task.raws.items():
            notes += [f"{task.task.name}: {note}" for note in raw.notes]
            if raw.left_out:
                notes.append(
                    f"{task.task.name}: {counted(raw.left_out, 'row')} of {split} cannot be used and are left out, "
                    f"for example {raw.problems[0]}"
                )
            if config.group and not raw.names_groups:
                notes.append(f"{task.task.name}: no {split} row names a group '{config.group}' (stream.group)")
        dropped = {split: raw.dropped for split, raw in task.raws.items() if raw.dropped}
        if dropped:
            listing = ", ".join(f"{count} {split}" for split, count in dropped.items())
            notes.append(f"{task.task.name}: rows without a label dropped: {listing}")
    for note in notes:
        log.info("%s", note)
    return notes
