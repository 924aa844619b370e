"""The continuous batch: texts join while others are decoded, each row has its own mixture and leaves at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone
from raycl.errors import AdapterError
from raycl.generation import dynamic_cache
from raycl.generation.requests import Event, Failed, GenerationRequest, ResponseMetadata, Sampling, TextDelta
from raycl.generation.sampling import NOT_FINITE, DecodedText, pick
from raycl.generation.static_cache import StaticKVCache
from raycl.types import Mixture

PATIENCE_S = 1.0
"""Seconds during which later texts may join before one whose adapters do not fit with the active ones."""

OVERFLOW = "the model's outputs are not finite under this mixture: use weights closer to those of training"

RequestT = TypeVar("RequestT", bound=GenerationRequest)


class AdapterModel(Protocol):
    """A backbone with adapters that are loaded when a mixture names them.

    Attributes:
        stack: its adapters.
    """

    backbone: Backbone
    stack: AdapterStack

    def fit(self, mixtures: Sequence[Mixture]) -> bool:
        """Return whether the adapters of all have room on the device together."""
        ...

    def activate(self, mixture: Mixture) -> AbstractContextManager[None]:
        """Activate a mixture for the code inside."""
        ...

    def activate_static(self, mixture: Mixture, weights_SN: Tensor) -> AbstractContextManager[int]:
        """Activate a mixture at addresses that do not change while the returned number stays the same."""
        ...

    def pin(self, keys: Sequence[str]) -> None:
        """Keep adapters loaded until they are unpinned as often as they were pinned."""
        ...

    def unpin(self, keys: Sequence[str]) -> None:
        """Undo one `pin` of each adapter."""
        ...


@dataclass(frozen=True)
class PreparedRequest(Generic[RequestT]):
    """A request whose mixture and prompt are known.

    Attributes:
        sampling: sampling of the request, limited to the tokens that fit.
    """

    request: RequestT
    mixture: Mixture
    ids: list[int]
    sampling: Sampling | None
    metadata: ResponseMetadata


@dataclass
class BatchRow(Generic[RequestT]):
    """A sequence of the running batch."""

    request: RequestT
    mixture: Mixture
    decoded: DecodedText
    draws: torch.Generator


class ContinuousBatch(Generic[RequestT]):
    """Texts that are being decoded.

    Attributes:
        joining: requests that wait until they fit.
        tokens: generated so far.
        patience_s: seconds for which later requests may pass one that does not fit.
    """

    def __init__(
        self,
        model: AdapterModel,
        max_rows: int,
        send: Callable[[RequestT, Event], None],
        static_cache: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Start empty.

        Args:
            send: called with every event.
            static_cache: decode at fixed addresses (`raycl.generation.static_cache`).
            patience_s: seconds for which later requests may pass one that does not fit.
        """
        self.patience_s = patience_s
        self.model, self.max_rows = model, max_rows
        self._static = StaticKVCache(model.backbone, max_rows) if static_cache else None
        self._graph_key = 0
        self.joining: list[PreparedRequest[RequestT]] = []
        self.tokens = 0
        self._send = send
        self._rows: list[BatchRow[RequestT]] = []
        self._state: dynamic_cache.DynamicKVCache | StaticKVCache | None = None
        self._active = ExitStack()

    def __bool__(self) -> bool:
        return bool(self.joining or self._rows)

    @property
    def captures(self) -> int:
        """The number of steps captured as CUDA graphs so far."""
        return 0 if self._static is None else self._static.captures

    @property
    def requests(self) -> list[RequestT]:
        """All requests that are not finished."""
        return [*(ready.request for ready in self.joining), *self.decoding]

    @property
    def decoding(self) -> list[RequestT]:
        """The requests that are decoded now."""
        return [row.request for row in self._rows]

    def joined(self) -> list[PreparedRequest[RequestT]]:
        """Take the requests that fit; a request that does not is passed over for `patience_s` only."""
        room, now = self.max_rows - len(self._rows), time.perf_counter()
        fresh: list[PreparedRequest[RequestT]] = []
        left: list[PreparedRequest[RequestT]] = []
        for request in self.joining:
            beside = [*(row.mixture for row in self._rows), *(other.mixture for other in fresh)]
            if len(fresh) < room and self.model.fit([*beside, request.mixture]):
                fresh.append(request)
                continue
            left.append(request)
            if now - request.request.began > self.patience_s:
                room = 0
        self.joining = left
        return fresh

    def begin(self, ready: list[PreparedRequest[RequestT]]) -> list[PreparedRequest[RequestT]]:
        """Read the prompts of requests and add them to the batch.

        Raises:
            RayclError: their adapters cannot be loaded; none of them is added.
        """
        self.deactivate()
        codec, mixture = self.model.backbone.codec, Mixture.stacked([request.mixture for request in ready])
        rows = []
        for item in ready:
            assert item.sampling is not None, "only texts are decoded"
            draws = torch.Generator().manual_seed(item.sampling.seed)
            rows.append(
                BatchRow(item.request, item.mixture, DecodedText(codec.tokenizer, codec.eos_id, item.sampling), draws)
            )
        with self.model.activate(mixture):
            state = dynamic_cache.begin(self.model.backbone, [request.ids for request in ready])
        before = self._state if self._static is None else self._static
        self._state = state if before is None else before.joined(state)
        self._rows += rows
        for row in rows:
            self.model.pin(row.mixture.names)
        return ready

    def step(self) -> None:
        """Decode one token for every row, and remove finished rows."""
        if self._state is None:
            return
        settings = [row.decoded.settings for row in self._rows]
        tokens = pick(self._state.logits, settings, [row.draws for row in self._rows])
        self.tokens += len(tokens)
        for row, token in zip(self._rows, tokens, strict=True):
            event = _event_of(row.decoded, token)
            if event is not None:
                self._send(row.request, event)
        going = [number for number, row in enumerate(self._rows) if not row.request.over]
        self._keep(going)
        if self._state is None:
            return
        if not self.model.stack.is_open:
            self._open(Mixture.stacked([row.mixture for row in self._rows]))
        device = self.model.backbone.device
        chosen = torch.tensor([tokens[number] for number in going], device=device)
        if isinstance(self._state, StaticKVCache):
            self._state.step(chosen, self._graph_key)
        else:
            self._state = dynamic_cache.step(self.model.backbone, self._state, chosen)

    def _open(self, mixture: Mixture) -> None:
        if isinstance(self._state, StaticKVCache):
            opened = self.model.activate_static(mixture, self._state.placed(mixture.weights))
            self._graph_key = self._active.enter_context(opened)
        else:
            self._active.enter_context(self.model.activate(mixture))

    def drop_cancelled(self) -> None:
        """Remove cancelled requests."""
        self.joining = [ready for ready in self.joining if not ready.request.cancelled]
        self._keep([number for number, row in enumerate(self._rows) if not row.request.cancelled])

    def clear(self) -> None:
        """Remove every row."""
        self._keep([])

    def deactivate(self) -> None:
        """Deactivate the mixture; the next step activates it again."""
        self._active.close()

    def _keep(self, going: Sequence[int]) -> None:
        """Keep only these rows."""
        if len(going) == len(self._rows):
            return
        self.deactivate()
        for number in set(range(len(self._rows))) - set(going):
            self.model.unpin(self._rows[number].mixture.names)
        self._rows = [self._rows[number] for number in going]
        if self._static is not None and self._state is not None:
            self._static.kept(going)
        elif going and self._state is not None:
            self._state = self._state.kept(going)
        self._state = self._state if going else None


def _event_of(decoded: DecodedText, token: int) -> Event | None:
    if token == NOT_FINITE:
        return Failed(AdapterError(OVERFLOW))
    text = decoded.push(token)
    return TextDelta(text, len(decoded.ids), decoded.finish) if text or decoded.finish else None
