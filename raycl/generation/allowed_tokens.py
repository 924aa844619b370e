"""The tokens that may follow each other, so that a generated answer is one of a few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class AllowedTokens:
    """The tokens of some answers, as a tree."""

    def __init__(self, answers: Iterable[Sequence[int]], end: int, forced: int | None = None) -> None:
        """Build the tree.

        Args:
            answers: ids of the answers, as they are learned. end: id of the end of the sequence.
            forced: the model's own first token of every answer, if it has one.
        """
        self._end = [end]
        self._after: dict[tuple[int, ...], list[int]] = {}
        for answer in answers:
            ids = [*answer] if forced is None else [forced, *answer]
            for position, token in enumerate(ids):
                known = self._after.setdefault(tuple(ids[:position]), [])
                known += [token] if token not in known else []

    def after(self, ids: Sequence[int]) -> list[int]:
        """Return tokens that may follow these of an answer; the end of the sequence where nothing else may."""
        return self._after.get(tuple(ids), self._end)
