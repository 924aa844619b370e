"""Answers without a server: a snapshot of a bank as a model in this process, with the endpoint's engine."""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from raycl.backbone.codec import HFCodec
from raycl.bank import Bank, Snapshot
from raycl.bank.manifest import TaskInfo
from raycl.data.prepare import fit_targets
from raycl.data.prompts import Prompt
from raycl.data.sources.conversation import Message, messages_of, text_of
from raycl.errors import AdapterError, BankError, ConversationError, RetrievalError
from raycl.generation.requests import AllowedTokens, Event, Failed, Sampling
from raycl.generation.task_prompts import route_batch
from raycl.metrics.settings import GeneralConfig
from raycl.progress import report
from raycl.scoring.general_ability import RoutedModel, check_general, measure
from raycl.scoring.scored_task import ScoredTask
from raycl.serve.engine.engine_requests import AdapterSelection, EngineRequest, is_last
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, rule_of
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.serve.errors import InternalError, UnknownTextError
from raycl.serve.service.opening import open_engine
from raycl.serve.service.service import ServedAnswer, take
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import adapters_of, router_of
from raycl.types import Batch, Mixture, Score

log: logging.Logger = logging.getLogger("raycl")

Text = str | Sequence[Message]
"""A text, or the messages of a conversation, whose last one is answered."""

Answers = Mapping[str, Sequence[int]]
"""Answers with their ids, which are empty where labels are not generated."""

TEXT_ERRORS = (AdapterError, ConversationError, InternalError, RetrievalError)
"""Errors on one text that do not affect others."""

WINDOW = 16
"""Batches of texts that are sorted by length together, so that a batch has little padding."""


@dataclass(frozen=True)
class Prediction:
    """The answer to one text.

    Attributes:
        text: The label with the largest probability, or the generated answer.
        scores: Label -> probability, the largest first; {} for generated answers.
        tasks: Task -> sum of its adapters' weights, the largest first.
        adapters: Adapter -> weight, the largest first.
        ood_score: Score from 0 to 1, near 1 for a text unlike all learned tasks; None: the router has no such score.
        cut_tokens: Tokens cut from the end of the text, which was longer than in training.
        unknown: The text counts as one of no learned task; None: not known.
        error: Why there is no answer; "": there is one. Texts that are refused as unknown have an error.

    Examples:
        >>> for prediction in model.predict(["a cup of tea", "a loaf of bread"]):
        ...     assert not prediction.error, prediction.text
    """

    text: str
    scores: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, float] = field(default_factory=dict)
    adapters: Mapping[str, float] = field(default_factory=dict)
    ood_score: float | None = None
    cut_tokens: int = 0
    unknown: bool | None = None
    error: str = ""


def settings_here(bank: Bank) -> dict[str, Any]:
    """Return settings of serving that fit this process: torch keeps its number of threads."""
    return {"bank": bank.storage.address, "threads": torch.get_num_threads()}


class OfflineModel:
    """A snapshot that answers texts.

    Attributes:
        snapshot: whose adapters and router answer.
        answers: `label` or `text`.
        codec: codec of its backbone.
    """

    def __init__(self, engine: ServingEngine, loaded: LoadedSnapshot) -> None:
        """Wrap a snapshot that an engine has loaded."""
        self.snapshot: Snapshot = loaded.snapshot
        self.answers = engine.capabilities.answers
        self.codec: HFCodec = engine.model.backbone.codec
        self._engine, self._loaded, self._has_warned = engine, loaded, False

    @classmethod
    def open(cls, bank: Bank, snapshot: Snapshot, config: ServeConfig | None = None) -> OfflineModel:
        """Load the backbone and the snapshot.

        Args:
            config: device, dtype, threads, batch size and the like; what concerns a server has no effect. None: as
                `settings_here`.

        Raises:
            BankError: the snapshot is damaged. BackboneError: the backbone cannot be loaded, or is another one.
            ConfigError: the device does not exist.
        """
        config = config or ServeConfig(**settings_here(bank))
        engine = open_engine(config, snapshot)
        with ExitStack() as stack:
            stack.callback(engine.close)
            router = router_of(bank, snapshot, config.permissions)
            rule = rule_of(snapshot, router, config.unknown, config.false_alarms)
            loaded = LoadedSnapshot.of(snapshot, router, adapters_of(bank, snapshot), rule=rule)
            engine.load_snapshot(loaded)
            stack.pop_all()  # it stays open
        return cls(engine, loaded)

    @property
    def reads_alone(self) -> bool:
        """Return whether texts without their task are answered, and may get another prompt than that of their task."""
        loaded = self._loaded
        return not loaded.asks_for_task and (loaded.has_chats or len(set(loaded.prompts.values())) > 1)

    def predict(
        self,
        texts: Iterable[Text],
        task: str | None = None,
        max_tokens: int | None = None,
        keep_errors: bool = False,
        allowed: Answers | None = None,
        bare: bool = False,
        templated: bool = True,
    ) -> Iterator[Prediction]:
        """Yield the answer to each text or conversation, in order; texts are read as answers are taken, a few batches
        ahead.

        Generated answers take the most likely token, as in evaluation.

        Args:
            task: task of all texts, if it is known; a warning says where the router ignores it.
            max_tokens: limit of generated answers; None: as in training.
            keep_errors: a text that the model fails on gets a prediction without an answer (`Prediction.error`).
            allowed: the only answers (`answers_of`); None: all. The text of a label is "" where none of them is known.
            bare: the backbone without adapters answers.
            templated: texts get the prompts of their tasks; else they are whole prompts.

        Raises:
            BankError: no such task. RayclError: a text cannot be answered.
        """
        if task is not None:
            self.snapshot.require_task(task)
            self._warn_of(task)
        return self._predicted(texts, task, max_tokens, allowed or {}, keep_errors, bare, templated)

    def answers_of(self, task: TaskInfo) -> Answers:
        """Return the labels of a learned task with their ids, written and cut as the answers of its rows."""
        labels, limit = task.labels or (), self.snapshot.token_limits(task.name)[1] or self.codec.max_target_tokens
        ids, _ = fit_targets([""] * len(labels), labels, self._loaded.prompts[task.name], self.codec, limit)
        return dict(zip(labels, ids, strict=True))

    def as_generated(self, text: str, references: Sequence[str], task: str) -> list[str]:
        """Return accepted answers to a row as the model generates them (`Prompt.as_generated`).

        Args:
            text: the row's text. task: the task that it is answered as; "": none.
        """
        prompt = self._loaded.prompts.get(task) or Prompt(chat_template=self.codec.chat_template)
        return prompt.as_generated([text], [references], self.codec)[0]

    def answers_to(self, rows: ScoredTask) -> list[str]:
        """Return an answer to each row of a task, in its own prompt or by the text alone (`eval.instruction`)."""
        texts = [messages_of(text) for text in rows.texts] if rows.stream.is_chat(rows.task) else rows.texts
        is_given = rows.settings.instruction == "given" or self._loaded.asks_for_task
        predictions = self._predicted(texts, rows.task.name if is_given else None, rows.limit, rows.allowed)
        return [prediction.text.strip() for prediction in predictions]

    def general(self, settings: GeneralConfig, is_bare: bool = False) -> dict[str, Score]:
        """Return the general ability of the snapshot: the task of lm-eval and its metric -> score.

        Args:
            is_bare: the backbone without adapters answers.

        Raises:
            BankError: the router needs each text's task, or gives unknown texts no answer. RayclError: see
                `check_general`.
        """
        loaded, model = self._loaded, self._engine.model
        problem = "needs the task of each text" if loaded.asks_for_task else ""
        if loaded.rule.policy == "refuse":
            problem = "refuses texts of no learned task (unknown=refuse; expected nearest or bare)"
        if problem and not is_bare:
            raise BankError(
                f"the router of snapshot {self.snapshot.number} {problem}, so its general ability cannot be measured"
            )
        check_general(settings, self.codec, self.snapshot.backbone.name)

        def route(batch: Batch) -> Mixture | None:
            if is_bare:
                return None
            mixture = route_batch(loaded.router, model.backbone, model.stack, batch)
            return loaded.rule.applied(loaded.named(mixture))

        def activate(mixture: Mixture | None) -> AbstractContextManager[None]:
            return model.stack.activate(None) if mixture is None else model.activate(mixture)

        size, reserved = self._engine.max_batch, loaded.prompt_positions()
        routed = RoutedModel(model.backbone, activate, route, size, reserved)
        return self._engine.call(partial(measure, routed, settings)).result()

    def _predicted(
        self,
        texts: Iterable[Text],
        task: str | None,
        max_tokens: int | None,
        allowed: Answers,
        keep_errors: bool = False,
        bare: bool = False,
        templated: bool = True,
    ) -> Iterator[Prediction]:
        sampling = None
        if self.answers != "label":
            tree = AllowedTokens(allowed.values(), self.codec.eos_id) if allowed else None
            sampling = Sampling(max_tokens or sys.maxsize, as_trained=not max_tokens, allowed=tree)
        selection, source = AdapterSelection({} if bare else None, task), iter(texts)
        while window := list(islice(source, WINDOW * self._engine.max_batch)):
            for prediction in self._window(window, selection, keep_errors, sampling=sampling, templated=templated):
                if allowed and prediction.scores:
                    known = next((label for label in prediction.scores if label in allowed), "")
                    prediction = replace(prediction, text=known)
                yield prediction

    def _warn_of(self, task: str) -> None:
        """Warn once if the router does not select by the task."""
        loaded = self._loaded
        if self._has_warned or loaded.router.reads_task or loaded.head_rule == "label_count":
            return
        self._has_warned = True
        effect = "selects the prompt alone" if len(set(loaded.prompts.values())) > 1 else "has no effect"
        way = "goes by each text" if loaded.router.chooses else "gives all texts the same adapters"
        log.warning("task '%s' %s: the router of snapshot %d %s", task, effect, self.snapshot.number, way)

    def route(self, texts: Sequence[Text]) -> list[dict[str, float]]:
        """Return task -> weight for each text, the largest first, without answers.

        Raises:
            RayclError: the router needs the task, or cannot read a text.
        """
        return [dict(response.tasks) for response in self._window(texts, AdapterSelection(), route_only=True)]

    def _window(
        self, texts: Sequence[Text], selection: AdapterSelection, keep_errors: bool = False, **settings: Any
    ) -> list[Prediction]:
        """Return the answer to each text.

        Args:
            settings: fields of the texts' `EngineRequest`.
        """
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        began = time.perf_counter()

        def send(number: int, event: Event) -> None:
            events.put((number, event))

        settings |= {"loaded": self._loaded, "selection": selection}
        requests = []
        for number, text in enumerate(texts):
            written = text if isinstance(text, str) else text_of(text)
            is_chat = not isinstance(text, str)
            requests.append(EngineRequest(written, partial(send, number), is_chat=is_chat, **settings))
        for request in sorted(requests, key=lambda text_request: -len(text_request.text)):
            self._engine.submit(request)
        answers, errors = [ServedAnswer() for _ in texts], dict[int, str]()
        left = len(texts)
        try:
            while left:
                number, event = events.get()
                if isinstance(event, Failed):
                    kept = (*(TEXT_ERRORS if keep_errors else ()), UnknownTextError)
                    if not isinstance(event.error, kept):
                        raise event.error
                    errors[number] = str(event.error)
                else:
                    take(answers[number], event, began)
                left -= is_last(event, requests[number].route_only)
                report("answering texts", len(texts) - left, len(texts))
        finally:
            for request in requests:
                request.cancelled = True
        return [
            Prediction("", error=errors[number]) if number in errors else self._prediction(answer)
            for number, answer in enumerate(answers)
        ]

    def _prediction(self, answer: ServedAnswer) -> Prediction:
        metadata = answer.metadata
        assert metadata is not None, "an answer begins with its metadata"
        keys = self._loaded.keys
        return Prediction(
            text=next(iter(answer.scores)) if answer.scores else answer.text,
            scores=answer.scores,
            tasks=self._loaded.shares({keys[name]: weight for name, weight in metadata.weights.items()}),
            adapters=metadata.weights,
            ood_score=metadata.ood_score,
            cut_tokens=metadata.cut_tokens,
            unknown=metadata.unknown,
        )

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> OfflineModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
