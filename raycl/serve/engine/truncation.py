"""A text as the ids of its prompt: truncated at its end as in training, or rejected where it may not be truncated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.serve.errors import LimitExceededError, PromptTooLongError
from raycl.types import TextCodec


class PromptRequest(NamedTuple):
    """A text to encode.

    Attributes:
        is_input: it may be truncated.
        ahead: positions that soft prompts take.
        most: tokens of an input, as its task was trained; None: those of the endpoint.
        ids: the prompt's tokens where the request gives them instead of a text.
    """

    text: str
    prompt: Prompt
    is_input: bool
    ahead: int
    most: int | None = None
    ids: tuple[int, ...] | None = None


class RoutedPrompt(NamedTuple):
    """The properties of an answer before its text is read.

    Attributes:
        weights: adapter -> weight. task: the task that the text is read as; "": none.
        template: the same, where its prompt adds something to the text; "": it does not.
        max_tokens: limit of an answer in that task's training.
    """

    weights: dict[str, float]
    task: str
    template: str
    prompt_request: PromptRequest
    max_tokens: int


@dataclass(frozen=True)
class TruncatedPrompt:
    """A prompt that the model reads.

    Attributes:
        cut: tokens that were removed.
        room: most tokens of an answer; None: no limit.
    """

    ids: list[int]
    cut: int
    room: int | None


@dataclass
class Truncation:
    """Truncates prompts to the limits of a backbone.

    Attributes:
        positions: limit of a prompt (`Backbone.max_positions`); None: no limit.
        max_source: tokens of an input; longer ones are truncated, as in training.
        max_prompt: tokens of a prompt that is not an input, and is never cut.
        answer_positions: limit of an answer (`Backbone.max_answer_positions`).
    """

    codec: TextCodec
    positions: int | None
    max_source: int
    max_prompt: int
    answer_positions: int | None = None

    def fit(self, prompt_request: Sequence[PromptRequest]) -> list[TruncatedPrompt]:
        """Return the ids of texts with their prompts around them; equal texts are encoded once.

        Raises:
            PromptTooLongError: one that may not be truncated is too long. LimitExceededError: one has no token.
        """
        unlike = list(dict.fromkeys(prompt_request))
        by_prompt: dict[Prompt, list[PromptRequest]] = {}
        for request in unlike:
            by_prompt.setdefault(request.prompt, []).append(request)
        truncated: dict[PromptRequest, TruncatedPrompt] = {}
        for prompt, requests in by_prompt.items():
            written = [request for request in requests if request.ids is None]
            read = {request: list(request.ids) for request in requests if request.ids is not None}
            texts = [request.text for request in written]
            read |= zip(written, prompt.encode(texts, self.codec), strict=True)
            truncated |= {request: self._truncate(request, read[request]) for request in requests}
        return [truncated[request] for request in prompt_request]

    def _truncate(self, prompt_request: PromptRequest, ids: list[int]) -> TruncatedPrompt:
        most = (prompt_request.most or self.max_source) if prompt_request.is_input else self.max_prompt
        if self.positions is not None:
            most = min(most, self.positions - prompt_request.ahead - (self.codec.capabilities.one_sequence))
        if not ids:
            raise LimitExceededError("the text holds no token: expected at least one word")
        whole = len(ids)
        if whole > most and not prompt_request.is_input:
            raise PromptTooLongError(
                f"the prompt has {whole} tokens, this endpoint reads at most {most}: send less text"
            )
        if whole > most:
            ids = fit_sources([prompt_request.text], prompt_request.prompt, self.codec, most)[0][0]
        room = self.answer_positions
        if room is not None and self.codec.capabilities.one_sequence:
            room -= prompt_request.ahead + len(ids)  # what the prompt leaves for its answer
        return TruncatedPrompt(ids, whole - len(ids), room)
