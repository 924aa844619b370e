"""The model's thread: takes asks in, routes them together, answers them in batches that change with every token.

Requests that came while a batch was computed make the next one, so nobody waits for a timer. Labels are one forward
pass; texts are decoded in one running batch that new ones join and finished ones leave, each row with its own mixture,
and rows of different snapshots side by side.
What it does not know: HTTP, event loops, where snapshots come from.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from raycl.backbone import running
from raycl.backbone.encoder import EncoderBackbone
from raycl.data.loader import batch_of
from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.errors import AdapterError, RayclError
from raycl.serve.asks import FAILURES, Ask, Failed, Labelled, Made, Piece, Started
from raycl.serve.host import Host, Hosted, stacked
from raycl.serve.model import heads_of
from raycl.serve.sampling import Spoken, pick
from raycl.types import Mixture

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Row:
    """A sequence of the running batch."""

    ask: Ask
    mixture: Mixture
    spoken: Spoken
    draws: torch.Generator


@dataclass(frozen=True)
class Ready:
    """An ask whose mixture and prompt are known."""

    ask: Ask
    mixture: Mixture
    ids: list[int]
    made: Made


class Engine:
    """Answers asks on a thread of its own.

    Attributes:
        host: the backbone; only this thread touches it.
        counts: what happened so far, by name, for metrics.
    """

    def __init__(self, host: Host, max_batch: int, max_source_tokens: int, max_target_tokens: int) -> None:
        """Start the thread.

        Args:
            max_batch: rows that are computed together.
            max_source_tokens: longest prompt; longer inputs are cut at their end, as in training.
            max_target_tokens: of an answer, where the ask does not say.
        """
        self.host, self.max_batch = host, max_batch
        self.max_source, self.max_target = max_source_tokens, max_target_tokens
        self.counts = {"batches": 0, "rows": 0, "adapters": 0, "hits": 0, "misses": 0, "tokens": 0, "retrieval_s": 0.0}
        self._inbox: queue.SimpleQueue[Ask | tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._waiting: list[Ask] = []
        self._joining: list[Ready] = []
        self._rows: list[Row] = []
        self._state: running.Running | None = None
        self._speaking = ExitStack()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="raycl-engine", daemon=True)
        self._thread.start()

    def submit(self, ask: Ask) -> None:
        """Take an ask; its events come through `ask.send`."""
        self._inbox.put(ask)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run something on the model's thread, between two batches."""
        done: Future[T] = Future()
        self._inbox.put((function, done))
        return done

    def take_on(self, hosted: Hosted) -> None:
        """Put a snapshot on the host, between two batches; blocks until it is there.

        Raises:
            BankError: see `Host.add`.
        """
        self.call(lambda: self.host.add(hosted)).result()

    def let_go(self, number: int) -> None:
        """Take a snapshot from the host, between two batches."""
        self.call(lambda: self.host.drop(number)).result()

    @property
    def kind(self) -> str:
        """Of the backbone: encoder, encoder-decoder, decoder."""
        return self.host.backbone.codec.kind

    @property
    def load(self) -> int:
        """Asks that are not finished."""
        return self._inbox.qsize() + len(self._waiting) + len(self._joining) + len(self._rows)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop after what is being computed now; asks that wait are failed."""
        self._inbox.put(None)
        self._thread.join(timeout=60)

    # ---- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            self._take()
            if self._waiting:
                self._start()
            if self._joining:
                self._join()
            if self._rows:
                self._guarded(self._step, [row.ask for row in self._rows], self._abandon)
        self._silence()
        for ask in [*self._waiting, *(ready.ask for ready in self._joining), *(row.ask for row in self._rows)]:
            ask.send(Failed(RayclError("the server is shutting down")))

    def _take(self) -> None:
        """Everything that came in; waits only if there is nothing else to do."""
        idle = not (self._waiting or self._joining or self._rows)
        while idle or not self._inbox.empty():
            item = self._inbox.get()
            idle = False
            if item is None:
                self._stopped = True
                return
            if isinstance(item, Ask):
                self._waiting.append(item)
                continue
            function, done = item
            self._silence()
            try:
                done.set_result(function())
            except FAILURES as error:  # handed to whoever asked
                done.set_exception(error)

    def _start(self) -> None:
        """Route what waits; then labels are answered, and texts wait to join."""
        taken, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
        asks = [ask for ask in taken if not ask.cancelled]
        ready = self._isolated(self._routed, asks, lambda ask: ask)
        for one in ready:
            one.ask.send(Started(one.made))
        self._joining += [one for one in ready if one.ask.sampling is not None]
        labels = [one for one in ready if one.ask.sampling is None and not one.ask.route_only]
        for group in self._groups(labels):
            self._isolated(self._labelled, group, lambda one: one.ask)

    def _isolated(
        self, work: Callable[[list[Any]], list[Any]], items: list[Any], ask: Callable[[Any], Ask]
    ) -> list[Any]:
        """`work` on all; if that fails, on each alone, so that one that cannot be answered spoils no other."""
        try:
            return work(items) if items else []
        except FAILURES as error:  # a request must never end the thread
            if len(items) == 1:
                self._fail(ask(items[0]), error)
                return []
            return [found for item in items for found in self._isolated(work, [item], ask)]

    def _guarded(self, work: Callable[[], None], asks: Sequence[Ask], after: Callable[[], None]) -> None:
        try:
            work()
        except FAILURES as error:  # a request must never end the thread
            for ask in asks:
                self._fail(ask, error)
            after()

    def _fail(self, ask: Ask, error: Exception) -> None:
        if not isinstance(error, RayclError):
            log.exception("an answer failed", exc_info=error)
        ask.send(Failed(error))

    # ---- choosing --------------------------------------------------------------------------------------------

    def _routed(self, asks: list[Ask]) -> list[Ready]:
        began = time.perf_counter()
        mixtures: dict[int, Mixture] = {}
        for hosted in {id(ask.hosted): ask.hosted for ask in asks}.values():
            mine = [number for number, ask in enumerate(asks) if ask.hosted is hosted]
            mixtures |= dict(zip(mine, mixtures_of(hosted, [asks[number] for number in mine]), strict=True))
        spent = (time.perf_counter() - began) * 1e3
        self.counts["retrieval_s"] += spent / 1e3
        return [self._prompted(ask, mixtures[number], began, spent, len(asks)) for number, ask in enumerate(asks)]

    def _prompted(self, ask: Ask, mixture: Mixture, routed_at: float, spent: float, batch: int) -> Ready:
        hosted, codec = ask.hosted, self.host.backbone.codec
        pairs = zip(mixture.names, mixture.weights[0].tolist(), strict=True)
        weights = {hosted.names[key]: weight for key, weight in pairs}
        task = _loudest(hosted, mixture) if ask.templated else ""
        prompt = hosted.prompts.get(task, Prompt())
        limit = self.max_source if ask.sampling is None or ask.templated else 10**9
        ids = fit_sources([ask.text], prompt, codec, limit)[0][0]
        cut = max(0, len(codec.encode_source([prompt.around(ask.text)])[0]) - len(ids))
        made = Made(
            snapshot=hosted.snapshot.number,
            weights=dict(sorted(weights.items(), key=lambda pair: -pair[1])),
            template=task if prompt != Prompt() else "",
            prompt_tokens=len(ids),
            cut_tokens=cut,
            queue_ms=(routed_at - ask.began) * 1e3,
            retrieval_ms=spent,
            batch=batch,
        )
        return Ready(ask, mixture, ids, made)

    # ---- labels ----------------------------------------------------------------------------------------------

    def _groups(self, ready: list[Ready]) -> list[list[Ready]]:
        """Batches whose adapters fit on the device together and whose heads go by one rule."""
        groups: list[list[Ready]] = []
        for one in ready:
            for group in groups:
                if group[0].ask.hosted.head_rule == one.ask.hosted.head_rule and self._fit([*group, one]):
                    group.append(one)
                    break
            else:
                groups.append([one])
        return groups

    def _fit(self, ready: Sequence[Ready | Row]) -> bool:
        if self.host.stack.grows:
            return True
        names = {name for one in ready for name in one.mixture.names}
        return self.host.rows(sorted(names)) <= self.host.stack.table.capacity

    @torch.no_grad()
    def _labelled(self, ready: list[Ready]) -> list[Ready]:
        self._silence()
        backbone = self.host.backbone
        rule = ready[0].ask.hosted.head_rule
        told = [_head(one.ask) for one in ready] if rule == "label_count" else ()
        mixture = stacked([one.mixture for one in ready])
        self._count(mixture, len(ready))
        batch = batch_of([one.ids for one in ready], backbone.codec.pad_id).to(backbone.device)
        with self.host.speaking(mixture, rule, told), backbone.precision():
            assert isinstance(backbone, EncoderBackbone), "labels come from encoder-only backbones"
            scores = backbone.head(backbone.pooled(batch)).float()
        for one, row in zip(ready, scores, strict=True):
            one.ask.send(self._best(row, backbone.head.labels))
        return ready

    def _best(self, scores_C: Tensor, labels: Sequence[str]) -> Labelled | Failed:
        known = torch.isfinite(scores_C)
        if not bool(known.any()):
            return Failed(AdapterError("nobody who speaks for this text knows any label: choose adapters with labels"))
        chances = torch.where(known, scores_C, -torch.inf).softmax(0)
        found = [(labels[place], float(chances[place])) for place in chances.argsort(descending=True).tolist()]
        return Labelled({label: chance for label, chance in found if chance > 0})

    # ---- texts -----------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """As many as there is room for begin to be decoded."""
        room = self.max_batch - len(self._rows)
        fresh: list[Ready] = []
        left: list[Ready] = []
        for one in self._joining:
            if one.ask.cancelled:
                continue
            fits = len(fresh) < room and self._fit([*self._rows, *fresh, one])
            (fresh if fits else left).append(one)
        if not fresh and left and not self._rows:
            error = AdapterError("the adapters of this mixture do not fit on the device together: raise resident_rows")
            self._fail(left.pop(0).ask, error)
        self._joining = left
        self._isolated(self._begun, fresh, lambda one: one.ask)

    def _begun(self, ready: list[Ready]) -> list[Ready]:
        self._silence()
        mixture = stacked([one.mixture for one in ready])
        self._count(mixture, len(ready))
        with self.host.speaking(mixture):
            state = running.begin(self.host.backbone, [one.ids for one in ready])
        self._state = state if self._state is None else self._state.joined(state)
        codec = self.host.backbone.codec
        for one in ready:
            settings = one.ask.sampling
            assert settings is not None
            draws = torch.Generator().manual_seed(settings.seed)
            self._rows.append(Row(one.ask, one.mixture, Spoken(codec.tokenizer, codec.eos_id, settings), draws))
        return ready

    def _step(self) -> None:
        """One token for every row; those that ended leave."""
        assert self._state is not None
        settings = [row.spoken.settings for row in self._rows]
        tokens = pick(self._state.logits, settings, [row.draws for row in self._rows])
        self.counts["tokens"] += len(tokens)
        for row, token in zip(self._rows, tokens, strict=True):
            text = row.spoken.push(token)
            if (text or row.spoken.finish) and not row.ask.cancelled:
                row.ask.send(Piece(text, len(row.spoken.ids), row.spoken.finish))
        going = [number for number, row in enumerate(self._rows) if not (row.spoken.finish or row.ask.cancelled)]
        if len(going) < len(self._rows):
            self._silence()
            self._state = self._state.kept(going) if going else None
            self._rows = [self._rows[number] for number in going]
            tokens = [tokens[number] for number in going]
        if self._state is None:
            return
        self._speak()
        self._state = running.step(
            self.host.backbone, self._state, torch.tensor(tokens, device=self.host.backbone.device)
        )

    def _speak(self) -> None:
        """The mixture of all rows, opened once for as long as the rows stay the same."""
        if not self.host.stack.is_open:
            mixture = stacked([row.mixture for row in self._rows])
            self._count(mixture, len(self._rows))
            self._speaking.enter_context(self.host.speaking(mixture))

    def _silence(self) -> None:
        self._speaking.close()

    def _abandon(self) -> None:
        self._silence()
        self._rows, self._state = [], None

    def _count(self, mixture: Mixture, rows: int) -> None:
        resident = sum(name in self.host.stack.states for name in mixture.names)
        more = {"batches": 1, "rows": rows, "adapters": len(mixture.names)}
        more |= {"hits": resident, "misses": len(mixture.names) - resident}
        self.counts = {name: value + more.get(name, 0) for name, value in self.counts.items()}


def mixtures_of(hosted: Hosted, asks: Sequence[Ask]) -> list[Mixture]:
    """One mixture of one row for each ask of a snapshot, of those that speak for it alone."""
    free = [number for number, ask in enumerate(asks) if ask.choice.weights is None]
    found = {
        number: hosted.named(Mixture.same(ask.choice.weights, 1))
        for number, ask in enumerate(asks)
        if ask.choice.weights is not None
    }
    if free:
        tasks = [task for number in free if (task := asks[number].choice.task) is not None]
        texts = [asks[number].text for number in free]
        whole = hosted.mixture(texts, tasks if len(tasks) == len(free) else None)
        for number, weights in zip(free, whole.weights, strict=True):
            spoken = weights.nonzero().flatten().tolist()
            one = Mixture(tuple(whole.names[column] for column in spoken), weights[None, spoken])
            found[number] = _hard(hosted, one) if asks[number].choice.hard else one
    return [found[number] for number in range(len(asks))]


def _hard(hosted: Hosted, mixture: Mixture) -> Mixture:
    """Only the loudest task's adapters, at the weights among them."""
    task = _loudest(hosted, mixture)
    alone = mixture.weights * torch.tensor([[task in hosted.owners[key] for key in mixture.names]])
    return replace(mixture, weights=alone / alone.sum(1, keepdim=True))


def _loudest(hosted: Hosted, mixture: Mixture) -> str:
    """The task with the largest summed weight; "" for the bare backbone."""
    return next(iter(hosted.shares(dict(zip(mixture.names, mixture.weights[0].tolist(), strict=True)))), "")


def _head(ask: Ask) -> str:
    return heads_of(ask.hosted, [ask.choice.task] if ask.choice.task else None)[0]
