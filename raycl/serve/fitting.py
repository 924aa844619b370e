"""A text as the ids of its prompt: cut at its end as in training, or refused where nothing may be cut.

What it does not know: who asks, what is made of the ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from raycl.backbone import Backbone
from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.serve.refusals import TooLongError, TooMuchError


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
        positions = getattr(backbone.model.config, "max_position_embeddings", None)
        self.positions: int | None = None if positions is None else int(positions)

    def fit(self, text: str, prompt: Prompt, is_input: bool, ahead: int) -> Fitted:
        """The ids of a text with its prompt around it.

        Args:
            is_input: it may be cut.
            ahead: positions that soft prompts take.

        Raises:
            TooLongError: it may not be cut, and is too long. TooMuchError: there is nothing in it.
        """
        most = self.max_source if is_input else self.max_prompt
        if self.positions is not None:
            most = min(most, self.positions - ahead - (self.codec.kind == "decoder"))
        ids = self.codec.encode_source([prompt.around(text)])[0]
        if not ids:
            raise TooMuchError("the text holds no token: expected at least one word")
        whole = len(ids)
        if whole > most and not is_input:
            raise TooLongError(f"the prompt has {whole} tokens, this endpoint reads at most {most}: send less text")
        if whole > most:
            ids = fit_sources([text], prompt, self.codec, most)[0][0]
        return Fitted(ids, whole - len(ids), self._room(len(ids), ahead))

    def _room(self, length: int, ahead: int) -> int | None:
        """A decoder's answer goes on where the prompt ends; another's has positions of its own."""
        if self.positions is None:
            return None
        return self.positions - (ahead + length if self.codec.kind == "decoder" else 0)
