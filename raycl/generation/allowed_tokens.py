"""Which tokens may follow which, so that a generated answer is one of a few.

What it does not know: models, batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from raycl.backbone.codec import HFCodec


class AllowedTokens:
    """The tokens of some answers, as a tree."""

    def __init__(self, codec: HFCodec, answers: Sequence[str], forced: int | None = None) -> None:
        """Tokenise them.

        Args:
            forced: the model's own first token of every answer, if it has one.
        """
        self._end = [codec.eos_id]
        self._after: dict[tuple[int, ...], list[int]] = {}
        for answer in codec.encode_target(answers):
            ids = answer if forced is None else [forced, *answer]
            for place, token in enumerate(ids):
                known = self._after.setdefault(tuple(ids[:place]), [])
                known += [token] if token not in known else []

    def after(self, ids: Sequence[int]) -> list[int]:
        """Tokens that may follow these of an answer; the end of the sequence where nothing else may."""
        return self._after.get(tuple(ids), self._end)
