"""A text as the ids of its prompt: cut at its end as in training, or refused where nothing may be cut.

What it does not know: who asks, what is made of the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raycl.backbone import Backbone
from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.serve.errors import LimitExceededError, PromptTooLongError


class PromptRequest(NamedTuple):
    """What is to be read.

    Attributes:
        is_input: it may be cut.
        ahead: positions that soft prompts take.
    """

    text: str
    prompt: Prompt
    is_input: bool
    ahead: int


@dataclass(frozen=True)
class TruncatedPrompt:
    """A prompt that the model reads.

    Attributes:
        cut: tokens of the whole that were left out.
        room: tokens that an answer may have behind it; None: no limit.
    """

    ids: list[int]
    cut: int
    room: int | None


class Truncation:
    """What fits into one backbone."""

    def __init__(self, backbone: Backbone, max_source: int, max_prompt: int) -> None:
        """Look at the backbone.

        Args:
            max_source: tokens of an input; what is longer is cut, as in training.
            max_prompt: tokens of a prompt that is not an input, and is never cut.
        """
        self.codec = backbone.codec
        self.max_source, self.max_prompt = max_source, max_prompt
        self.positions = backbone.max_positions

    def fit(self, prompt_request: Sequence[PromptRequest]) -> list[TruncatedPrompt]:
        """The ids of texts with their prompts around them; the same text is read once.

        Raises:
            PromptTooLongError: one may not be cut, and is too long. LimitExceededError: there is nothing in one.
        """
        unlike = list(dict.fromkeys(prompt_request))
        read = self.codec.encode_source([one.prompt.around(one.text) for one in unlike])
        found = {one: self._truncate(one, ids) for one, ids in zip(unlike, read, strict=True)}
        return [found[one] for one in prompt_request]

    def _truncate(self, prompt_request: PromptRequest, ids: list[int]) -> TruncatedPrompt:
        most = self.max_source if prompt_request.is_input else self.max_prompt
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
        return TruncatedPrompt(ids, whole - len(ids), self._room(len(ids), prompt_request.ahead))

    def _room(self, length: int, ahead: int) -> int | None:
        """A decoder's answer goes on where the prompt ends; another's has positions of its own."""
        if self.positions is None:
            return None
        return self.positions - (ahead + length if self.codec.capabilities.one_sequence else 0)
