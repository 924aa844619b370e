"""The model's thread: receives requests, routes them together, answers them in continuous batches.

Requests that came while a batch was computed form the next one, without a timer. Labels are one forward pass; texts are
decoded in one running batch that new ones join and finished ones leave, each row with its own mixture, and rows of
different snapshots side by side.
"""

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from raycl.adapters.state import check_alone
from raycl.backbone.codec import HFCodec
from raycl.data.loader import batch_of, parts_by_length
from raycl.data.prepare import fit_targets
from raycl.data.prompts import Prompt
from raycl.errors import AdapterError, BankError, ConfigError, RayclError
from raycl.generation.grammars import Grammar, Grammars, forms_of
from raycl.generation.requests import (
    AllowedTokens,
    Event,
    Failed,
    LabelScores,
    ResponseMetadata,
    Started,
    TokenConstraint,
)
from raycl.generation.task_prompts import route_batch
from raycl.scoring.scored_task import recorded_settings
from raycl.serve.engine.engine_requests import (
    CLOSED,
    FAILURES,
    EngineRequest,
    heads_of,
    is_last,
    mixtures_of,
    template_of,
)
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, MultiSnapshotModel
from raycl.serve.engine.request_batch import OVERFLOW, PreparedRequest, RequestBatch
from raycl.serve.engine.truncation import PromptRequest, RoutedPrompt, Truncation
from raycl.serve.errors import InternalError, UnknownTextError
from raycl.types import Capabilities, Mixture

log: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")

TREES = 64
"""Lists of choices whose tokens are kept."""

GATHER = 0.1
"""Share of the time that a batch of labels took, for which the engine waits after it until as many texts are there as
were in it or behind it. Clients that were just answered send their next ones then, and a batch of the first of them
alone takes a tenth of the time of all."""

PREFETCH_BATCH = 8
"""Adapters loaded onto the device between two batches: a few milliseconds."""


class ServingEngine:
    """Answers requests on a thread of its own.

    Attributes:
        model: the backbone with adapters; only this thread touches it.
        grammars: makes forms of answers, in any thread.
    """

    def __init__(
        self,
        model: MultiSnapshotModel,
        max_batch: int,
        max_source_tokens: int,
        max_target_tokens: int,
        max_prompt_tokens: int = 4096,
        static_cache: bool = False,
        keeps_to_labels: bool = False,
    ) -> None:
        """Start the thread.

        Args:
            max_batch: rows that are computed together.
            max_source_tokens: longest prompt of snapshots that no run made; longer inputs are cut at their end.
            max_target_tokens: limit of an answer of such a snapshot, unless the request sets it.
            max_prompt_tokens: longest prompt that is not an input; longer ones are rejected.
            static_cache: texts are decoded at fixed addresses (`raycl.generation.static_cache`).
            keeps_to_labels: answers of a task with labels are one of these.
        """
        self.model, self.max_batch = model, max_batch
        self._keeps_to_labels = keeps_to_labels
        self.grammars = Grammars(model.backbone.codec.tokenizer, sorted(model.backbone.end_ids))
        self._forms: dict[LoadedSnapshot, dict[str, Grammar]] = {}
        self._tree = lru_cache(maxsize=TREES)(self._new_tree)
        self.max_target = max_target_tokens
        backbone = model.backbone
        self._truncation = Truncation(
            backbone.codec,
            backbone.max_positions,
            max_source_tokens,
            max_prompt_tokens,
            backbone.max_answer_positions,
        )
        self._inbox: queue.SimpleQueue[EngineRequest | tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._waiting: list[EngineRequest] = []
        self._texts = RequestBatch(model, max_batch, self._send, static_cache)
        self._retrieval_s = 0.0
        self._expected, self._gathered_s = 0, 0.0  # texts of the next batch, and when it begins without them
        self._lock = threading.Lock()  # of the three below
        self._unfinished = 0
        self._open = True
        self._thread = threading.Thread(target=self._run, name="raycl-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; its events are passed to `request.send`."""
        with self._lock:
            if self._open:
                self._unfinished += 1
                self._inbox.put(request)
                return
        request.send(Failed(RayclError(CLOSED)))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run something on the model's thread, between two batches."""
        done: Future[T] = Future()
        with self._lock:
            if self._open:
                self._inbox.put((function, done))
                return done
        done.set_exception(RayclError(CLOSED))
        return done

    def load_snapshot(self, loaded: LoadedSnapshot) -> None:
        """Load a snapshot between batches, and its first adapters onto the device; blocks.

        Raises:
            BankError: see `MultiSnapshotModel.add`; or the forms of its tasks' answers cannot be read.
        """
        forms = self._forms_of(loaded)
        self.call(lambda: self.model.add(loaded)).result()
        self._forms[loaded] = forms
        keys = self.model.ahead(loaded)
        for first in range(0, len(keys), PREFETCH_BATCH):
            self.call(partial(self.model.prefetch, keys[first : first + PREFETCH_BATCH])).result()

    def unload_snapshot(self, loaded: LoadedSnapshot) -> None:
        """Unload a snapshot between batches."""
        self._forms.pop(loaded, None)
        self.call(lambda: self.model.drop(loaded)).result()

    def _forms_of(self, loaded: LoadedSnapshot) -> dict[str, Grammar]:
        """Return the forms of the answers of a snapshot's tasks, as its run evaluated them; labels have none."""
        formats = {} if self.capabilities.answers == "label" else recorded_settings(loaded.snapshot).response_format
        try:
            return forms_of(self.grammars, formats)
        except ConfigError as error:
            raise BankError(f"snapshot {loaded.snapshot.number} cannot answer as it was evaluated: {error}") from error

    @property
    def kind(self) -> str:
        """The kind of the backbone: encoder, encoder-decoder, decoder."""
        return self.model.backbone.codec.kind

    @property
    def capabilities(self) -> Capabilities:
        return self.model.backbone.capabilities

    @property
    def codec(self) -> HFCodec:
        return self.model.backbone.codec

    @property
    def counts(self) -> dict[str, float]:
        """Counts of events so far, by name, for metrics."""
        reused = self.model.prefixes.reused
        return {
            **self.model.counts,
            "tokens": self._texts.tokens,
            "retrieval_s": self._retrieval_s,
            "reused_tokens": reused,
        }

    @property
    def captures(self) -> int:
        """Decoding steps captured as CUDA graphs so far."""
        return self._texts.captures

    @property
    def pending(self) -> int:
        """Requests whose last event has not been sent."""
        return self._unfinished

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop after the current batch; waiting requests fail."""
        self._inbox.put(None)
        self._thread.join(timeout=60)

    # ---- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take():
                self._drop_cancelled()
                if self._waiting:
                    self._start()
                self._isolated(self._texts.begin, self._texts.joined(), lambda prepared: prepared.request)
                try:
                    self._texts.step()
                except FAILURES as error:  # a request must never end the thread
                    for request in self._texts.decoding:
                        self._fail(request, error)
                    self._texts.clear()
        finally:
            self._end()

    def _take(self) -> bool:
        """Take everything that came in; waits if there is nothing else to do, or for more texts of a batch. False: it
        is time to stop."""
        is_idle = not (self._waiting or self._texts)
        while True:
            try:
                item = self._inbox.get(timeout=None if is_idle else self._patience_s())
            except queue.Empty:
                return True
            is_idle = False
            if item is None:
                return False
            if isinstance(item, EngineRequest):
                self._waiting.append(item)
            else:
                self._texts.deactivate()
                function, done = item
                try:
                    done.set_result(function())
                except FAILURES as error:  # raised to the caller
                    done.set_exception(error)

    def _patience_s(self) -> float:
        """Return for how long the batch waits for another text; 0: it begins with those that are there."""
        if self._texts or len(self._waiting) >= self._expected:
            return 0.0
        return max(0.0, self._gathered_s - time.monotonic())

    def _end(self) -> None:
        """Accept no more requests and fail those that wait."""
        with self._lock:
            self._open = False
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, EngineRequest):
                self._waiting.append(item)
            elif item is not None:
                item[1].set_exception(RayclError(CLOSED))
        for request in [*self._waiting, *self._texts.requests]:
            self._send(request, Failed(RayclError(CLOSED)))
        self._texts.clear()

    def _drop_cancelled(self) -> None:
        gone = [request for request in (*self._waiting, *self._texts.requests) if request.cancelled]
        if gone:
            self._waiting = [request for request in self._waiting if not request.cancelled]
            self._texts.drop_cancelled()
        for request in gone:
            self._over(request)

    def _start(self) -> None:
        """Route what waits; then labels are answered, and texts wait to join."""
        began_s = time.monotonic()
        taken, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
        ready = self._isolated(self._routed, taken, lambda request: request)
        for prepared in ready:
            if prepared.metadata.unknown and prepared.request.is_refused:
                self._fail(prepared.request, UnknownTextError())
            elif prepared.sampling is not None or prepared.request.route_only:  # a label is sent together with this
                self._send(prepared.request, Started(prepared.metadata))
        ready = [prepared for prepared in ready if not prepared.request.over]
        self._texts.joining += [prepared for prepared in ready if prepared.sampling is not None]
        labelled = [prepared for prepared in ready if prepared.sampling is None]
        for group in self._groups(labelled):
            self._isolated(self._labelled, group, lambda prepared: prepared.request)
        ended_s = time.monotonic()
        soon = len(labelled) + len(self._waiting) + self._inbox.qsize()
        self._expected = min(soon, self.max_batch) if labelled else 0
        self._gathered_s = ended_s + GATHER * (ended_s - began_s)

    def _isolated(
        self, work: Callable[[list[Any]], list[Any]], items: list[Any], request_of: Callable[[Any], EngineRequest]
    ) -> list[Any]:
        """Run `work` on all items; if that fails, on each alone, so that a faulty item does not affect the others."""
        try:
            return work(items) if items else []
        except FAILURES as error:  # a request must never end the thread
            if len(items) == 1:
                self._fail(request_of(items[0]), error)
                return []
            return [output for item in items for output in self._isolated(work, [item], request_of)]

    def _fail(self, request: EngineRequest, error: Exception) -> None:
        if not isinstance(error, RayclError):
            log.error("an answer failed", exc_info=error)
            name = type(error).__name__
            error = InternalError(f"the model failed on this request ({name}): see the server's log")
        self._send(request, Failed(error))

    def _send(self, request: EngineRequest, event: Event) -> None:
        """Send an event, unless the last one has been sent."""
        if request.over:
            return
        if is_last(event, request.route_only):
            self._over(request)
        request.send(event)

    def _over(self, request: EngineRequest) -> None:
        if not request.over:
            request.over = True
            with self._lock:
                self._unfinished -= 1

    # ---- choosing --------------------------------------------------------------------------------------------

    def _routed(self, requests: list[EngineRequest]) -> list[PreparedRequest]:
        began = time.perf_counter()
        mixtures: dict[int, Mixture] = {}
        for loaded in {id(request.loaded): request.loaded for request in requests}.values():
            mine = [number for number, request in enumerate(requests) if request.loaded is loaded]
            group = [requests[number] for number in mine]
            mixtures |= dict(zip(mine, mixtures_of(loaded, group, self._route_prompts), strict=True))
        spent = (time.perf_counter() - began) * 1e3
        self._retrieval_s += spent / 1e3
        routed_prompts = [self._with_prompt(request, mixtures[number]) for number, request in enumerate(requests)]
        ready = []
        for number, (routed, truncated) in enumerate(
            zip(routed_prompts, self._truncation.fit([routed.prompt_request for routed in routed_prompts]), strict=True)
        ):
            request, sampling = requests[number], requests[number].sampling
            if sampling is not None:
                most = [sampling.max_tokens, *([routed.max_tokens] if sampling.as_trained else [])]
                most += [] if truncated.room is None else [truncated.room]
                sampling = replace(
                    sampling, max_tokens=min(most), allowed=sampling.allowed or self._limit(request, routed)
                )
            metadata = ResponseMetadata(
                snapshot=request.loaded.snapshot.number,
                weights=dict(sorted(routed.weights.items(), key=lambda pair: -pair[1])),
                template=routed.template,
                prompt_tokens=len(truncated.ids),
                cut_tokens=truncated.cut,
                queue_ms=(began - request.began) * 1e3,
                retrieval_ms=spent,
                batch=len(requests),
                ood_score=None if (scores := mixtures[number].ood_scores) is None else float(scores),
                ood_distance=None if (distances := mixtures[number].ood_distances) is None else float(distances),
                unknown=None if (unknown := mixtures[number].unknown) is None else bool(unknown),
            )
            ready.append(PreparedRequest(request, mixtures[number], truncated.ids, sampling, metadata))
        return ready

    def _limit(self, request: EngineRequest, routed: RoutedPrompt) -> TokenConstraint | None:
        """Return the limit to a request's choices, or to the labels or the form of the task that it is read as;
        None: no limit."""
        assert request.sampling is not None, "labels of a head are not written"
        choices, limit = request.sampling.choices, sys.maxsize
        if not choices and self._keeps_to_labels and routed.task:
            choices, limit = request.loaded.labels.get(routed.task, ()), routed.max_tokens
        if choices:
            return self._tree(routed.prompt_request.prompt, choices, limit)
        calls_tools = request.sampling.keeps_special
        return None if calls_tools else self._forms.get(request.loaded, {}).get(routed.task)

    def _new_tree(self, prompt: Prompt, choices: tuple[str, ...], limit: int) -> AllowedTokens:
        """Return the tokens of answers as they are learned behind a prompt; equal ones are made once."""
        ids, _ = fit_targets([""] * len(choices), choices, prompt, self.codec, limit)
        return AllowedTokens(ids, self.codec.eos_id)

    def _route_prompts(
        self, loaded: LoadedSnapshot, requests: Sequence[EngineRequest], tasks: Sequence[str]
    ) -> Mixture:
        """Return prompts as the model will read them, for a router beside it.

        Args:
            requests: all give their task id, or none does. tasks: whose template each prompt gets.
        """
        ahead = loaded.prompt_positions()
        prompts = []
        for request, task in zip(requests, tasks, strict=True):
            prompt = loaded.prompts.get(task, Prompt()) if request.templated else Prompt()
            is_input = request.templated or request.sampling is None
            most = loaded.snapshot.token_limits(task)[0]
            prompts.append(
                PromptRequest(request.reading.for_router(prompt), prompt, is_input, ahead, most, request.ids)
            )
        ids = [truncated.ids for truncated in self._truncation.fit(prompts)]
        batch = batch_of(ids, self.model.backbone.codec.pad_id).to(self.model.backbone.device)
        batch = replace(batch, texts=tuple(request.reading.routed for request in requests))
        self._texts.deactivate()  # hidden states are read without the adapters of texts that are being decoded
        given = [own for request in requests if (own := request.selection.task) is not None]  # all give one, or none
        return loaded.named(route_batch(loaded.router, self.model.backbone, self.model.stack, batch, given or None))

    def _with_prompt(self, request: EngineRequest, mixture: Mixture) -> RoutedPrompt:
        """Add the prompt of the request's task, else that of the task with the largest weight (`template_of`)."""
        loaded = request.loaded
        if not request.route_only and not self.model.fit([mixture]):
            raise AdapterError(
                f"{', '.join(mixture.names)} take {self.model.rows(mixture.names)} rows on the device together, this "
                f"endpoint keeps {self.model.stack.table.capacity}: choose fewer adapters, or raise max_loaded_rows"
            )
        check_alone(mixture, self.model.alone)
        pairs = zip(mixture.names, mixture.weights[0].tolist(), strict=True)
        weights = {loaded.names[key]: weight for key, weight in pairs}
        task = template_of(loaded, request, mixture) if request.templated else ""
        codec = self.model.backbone.codec
        prompt = loaded.prompt_of(task, request.reading, codec) if request.templated else Prompt()
        ahead = loaded.prompt_positions(weights.keys())
        is_input = (request.templated or request.sampling is None) and not request.has_tools
        source, target = loaded.snapshot.token_limits(task)
        prompt_request = PromptRequest(request.reading.for_model(prompt), prompt, is_input, ahead, source, request.ids)
        template = task if loaded.prompts.get(task, Prompt()) != Prompt() else ""
        return RoutedPrompt(weights, task, template, prompt_request, target or self.max_target)

    # ---- labels ----------------------------------------------------------------------------------------------

    def _groups(self, ready: list[PreparedRequest]) -> list[list[PreparedRequest]]:
        """Return batches whose adapters fit on the device together and whose heads go by one rule, on a CPU of similar
        lengths."""
        groups: list[list[PreparedRequest]] = []
        for prepared in ready:
            for group in groups:
                same = group[0].request.loaded.head_rule == prepared.request.loaded.head_rule
                if same and self.model.fit([other.mixture for other in (*group, prepared)]):
                    group.append(prepared)
                    break
            else:
                groups.append([prepared])
        if self.model.backbone.device.type != "cpu":
            return groups
        return [
            [group[row] for row in rows]
            for group in groups
            for rows in parts_by_length([len(prepared.ids) for prepared in group])
        ]

    @torch.no_grad()
    def _labelled(self, ready: list[PreparedRequest]) -> list[PreparedRequest]:
        backbone = self.model.backbone
        rule = ready[0].request.loaded.head_rule
        heads: list[str] = []
        for request in (prepared.request for prepared in ready) if rule == "label_count" else ():
            heads += heads_of(request.loaded, [request.selection.task] if request.selection.task else None)
        mixture = Mixture.stacked([prepared.mixture for prepared in ready])
        batch = batch_of([prepared.ids for prepared in ready], backbone.codec.pad_id).to(backbone.device)
        with self.model.activate(mixture, rule, heads):
            scores, labels = backbone.score_labels(batch)
        events = _best(scores.cpu(), labels)
        for prepared, event in zip(ready, events, strict=True):
            self._send(prepared.request, Started(prepared.metadata))
            self._send(prepared.request, event)
        return ready


def _best(scores_BC: Tensor, labels: Sequence[str]) -> list[LabelScores | Failed]:
    """Return each row's labels by falling probability; minus infinity means that no active adapter has the label."""
    known_BC = scores_BC != -torch.inf
    infinite_B = (known_BC & ~torch.isfinite(scores_BC)).any(1).tolist()
    unlabelled_B = (~known_BC).all(1).tolist()
    chances_BC, order_BC = torch.sort(scores_BC.softmax(1), dim=1, descending=True, stable=True)
    events: list[LabelScores | Failed] = []
    for infinite, unlabelled, chances, order in zip(
        infinite_B, unlabelled_B, chances_BC.tolist(), order_BC.tolist(), strict=True
    ):
        if infinite:
            events.append(Failed(AdapterError(OVERFLOW)))
        elif unlabelled:
            events.append(Failed(AdapterError("no selected adapter has a label head: select adapters that have one")))
        else:
            pairs = zip(order, chances, strict=True)
            events.append(LabelScores({labels[index]: chance for index, chance in pairs if chance > 0}))
    return events
