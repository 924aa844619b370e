"""Requests in the running batch: each waits until its adapters fit, then its text is sent while it is decoded."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from raycl.backbone import Backbone
from raycl.errors import AdapterError, RayclError
from raycl.generation import dynamic_cache
from raycl.generation.continuous_batch import BatchRow, ContinuousBatch
from raycl.generation.prefix_cache import Scope, ScopedPrompt
from raycl.generation.requests import Event, Failed, PromptLogprobs, ResponseMetadata, Sampling, TextDelta
from raycl.generation.sampling import NOT_FINITE, DecodedText
from raycl.serve.engine.engine_requests import EngineRequest
from raycl.serve.engine.multi_snapshot_model import MultiSnapshotModel
from raycl.types import Mixture

PATIENCE_S = 1.0
"""Seconds during which later texts may join before one whose adapters do not fit with the active ones."""

OVERFLOW = "the model's outputs are not finite under this mixture: use weights closer to those of training"

CANCELLED = "the answer is no longer wanted"

Send = Callable[[EngineRequest, Event], None]


@dataclass(frozen=True)
class PreparedRequest:
    """A request whose mixture and prompt are known.

    Attributes:
        sampling: sampling of the request, limited to the tokens that fit.
    """

    request: EngineRequest
    mixture: Mixture
    ids: list[int]
    sampling: Sampling | None
    metadata: ResponseMetadata


class RequestRow(BatchRow):
    """The answer to a request while it is decoded."""

    mixture: Mixture

    def __init__(self, prepared: PreparedRequest, backbone: Backbone, send: Send) -> None:
        assert prepared.sampling is not None, "only texts are decoded"
        prompt_ids = prepared.ids if backbone.capabilities.one_sequence else ()
        super().__init__(prepared.mixture, prepared.sampling, prompt_ids)
        self.request, self._send = prepared.request, send
        codec, continues = backbone.codec, None
        if not (
            prepared.request.templated or prepared.request.is_chat
        ):  # the answer follows the prompt's last character
            continues = prepared.ids[-4:] if codec.capabilities.one_sequence else []
        special = codec.special_strings if prepared.sampling.stop else ()
        self._decoded = DecodedText(codec.tokenizer, backbone.end_ids, prepared.sampling, continues, special)
        self.ids = self._decoded.ids

    def push(self, token: int) -> bool:
        """Send the text that the token completes."""
        if token == NOT_FINITE:
            self._send(self.request, Failed(AdapterError(OVERFLOW)))
        elif (text := self._decoded.push(token)) or self._decoded.finish:
            logprobs, self.logprobs = tuple(self.logprobs), []
            self._send(self.request, TextDelta(text, len(self.ids), self._decoded.finish, logprobs))
        return not self.request.over


class RequestBatch(ContinuousBatch[RequestRow]):
    """Requests that are decoded, and those that wait.

    Attributes:
        joining: requests that wait until they fit.
        patience_s: seconds for which later requests may pass one that does not fit.
    """

    def __init__(self, model: MultiSnapshotModel, max_rows: int, send: Send, static_cache: bool = False) -> None:
        """Start empty.

        Args:
            send: called with every event.
            static_cache: decode at fixed addresses (`raycl.generation.static_cache`).
        """
        super().__init__(model.backbone, self._activated, max_rows, model.activate_static if static_cache else None)
        self.patience_s = PATIENCE_S
        self.joining: list[PreparedRequest] = []
        self._model, self._send = model, send

    def _activated(self, mixture: Mixture | None) -> AbstractContextManager[None]:
        assert mixture is not None, "every request has a mixture"
        return self._model.activate(mixture)

    def __bool__(self) -> bool:
        return bool(self.joining or self.rows)

    @property
    def requests(self) -> list[EngineRequest]:
        """All requests that are not finished."""
        return [*(ready.request for ready in self.joining), *self.decoding]

    @property
    def decoding(self) -> list[EngineRequest]:
        """The requests that are decoded now."""
        return [row.request for row in self.rows]

    def joined(self) -> list[PreparedRequest]:
        """Take the requests that fit; a request that does not is passed over for `patience_s` only."""
        room, now = self.max_rows - len(self.rows), time.perf_counter()
        fresh: list[PreparedRequest] = []
        left: list[PreparedRequest] = []
        for request in self.joining:
            beside = [*(row.mixture for row in self.rows), *(other.mixture for other in fresh)]
            if len(fresh) < room and self._model.fit([*beside, request.mixture]):
                fresh.append(request)
                continue
            left.append(request)
            if now - request.request.began > self.patience_s:
                room = 0
        self.joining = left
        return fresh

    def begin(self, ready: list[PreparedRequest]) -> list[PreparedRequest]:
        """Read the prompts of requests and add them to the batch.

        Raises:
            RayclError: their adapters cannot be loaded; none of them is added.
        """
        self.deactivate()
        self._score_prompts(ready)
        whole = ready
        ready = [prepared for prepared in ready if not prepared.request.over]
        if not ready:
            return whole
        rows = [RequestRow(prepared, self.backbone, self._send) for prepared in ready]
        prompts = [ScopedPrompt(Scope.of(one.request.loaded, one.mixture), one.ids) for one in ready]

        def activate(numbers: Sequence[int]) -> AbstractContextManager[None]:
            return self._model.activate(Mixture.stacked([rows[number].mixture for number in numbers]))

        for numbers, read in self._model.prefixes.read(self.backbone, prompts, activate):
            self.join([rows[number] for number in numbers], read)
        for row in rows:
            self._model.pin(row.mixture.names)
        return whole

    def _score_prompts(self, ready: Sequence[PreparedRequest]) -> None:
        """Send the log probabilities of prompts that want them; requests for no token, and cancelled ones, end."""
        for prepared in ready:
            sampling = prepared.sampling
            assert sampling is not None, "only texts are decoded"
            if prepared.request.cancelled:  # while the prompts before it were read
                self._send(prepared.request, Failed(RayclError(CANCELLED)))
                continue
            if sampling.prompt_logprobs and not prepared.request.is_scored:
                with self._model.activate(prepared.mixture):
                    found = dynamic_cache.prompt_logprobs(self.backbone, prepared.ids, sampling.logprobs or 0)
                self._send(prepared.request, PromptLogprobs(prepared.ids[0], tuple(found)))
                prepared.request.is_scored = True  # where another request fails, this one is begun again
            if not sampling.max_tokens:
                self._send(prepared.request, TextDelta("", 0, "length"))

    def keep(self, going: Sequence[int]) -> list[RequestRow]:
        """Keep only the rows with these numbers; the adapters of the others may be unloaded."""
        staying = set(going)
        for number, row in enumerate(self.rows):
            if number not in staying:
                self._model.unpin(row.mixture.names)
        return super().keep(going)

    def drop_cancelled(self) -> None:
        self.joining = [ready for ready in self.joining if not ready.request.cancelled]
        self.keep([number for number, row in enumerate(self.rows) if not row.request.cancelled])

    def clear(self) -> None:
        """Remove every row."""
        self.keep([])
