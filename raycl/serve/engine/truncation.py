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
from raycl.serve.errors import TooLongError, TooMuchError


class Wanted(NamedTuple):
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
class Fitted:
    """A prompt that the model reads.

    Attributes:
        cut: tokens of the whole that were left out.
        room: tokens that an answer may have behind it; None: no limit.
    """

    ids: list[int]
    cut: int
    room: int | None


class Fitting:
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

    def fit(self, wanted: Sequence[Wanted]) -> list[Fitted]:
        """The ids of texts with their prompts around them; the same text is read once.

        Raises:
            TooLongError: one may not be cut, and is too long. TooMuchError: there is nothing in one.
        """
        unlike = list(dict.fromkeys(wanted))
        read = self.codec.encode_source([one.prompt.around(one.text) for one in unlike])
        found = {one: self._fitted(one, ids) for one, ids in zip(unlike, read, strict=True)}
        return [found[one] for one in wanted]

    def _fitted(self, wanted: Wanted, ids: list[int]) -> Fitted:
        most = self.max_source if wanted.is_input else self.max_prompt
        if self.positions is not None:
            most = min(most, self.positions - wanted.ahead - (self.codec.capabilities.one_sequence))
        if not ids:
            raise TooMuchError("the text holds no token: expected at least one word")
        whole = len(ids)
        if whole > most and not wanted.is_input:
            raise TooLongError(f"the prompt has {whole} tokens, this endpoint reads at most {most}: send less text")
        if whole > most:
            ids = fit_sources([wanted.text], wanted.prompt, self.codec, most)[0][0]
        return Fitted(ids, whole - len(ids), self._room(len(ids), wanted.ahead))

    def _room(self, length: int, ahead: int) -> int | None:
        """A decoder's answer goes on where the prompt ends; another's has positions of its own."""
        if self.positions is None:
            return None
        return self.positions - (ahead + length if self.codec.capabilities.one_sequence else 0)
