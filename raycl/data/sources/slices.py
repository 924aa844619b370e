"""Names of splits, and slices of them as `datasets` writes them: `train[:1000]`, `train[-100:]`, `train[10%:90%]`."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "dev": ("dev", "validation", "val", "eval"),
    "test": ("test",),
}
"""Split -> the names that it may have, in files, columns and datasets."""

_SLICE = re.compile(r"(?P<name>.*)\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\]", re.DOTALL)


@dataclass(frozen=True)
class Slice:
    """A slice of rows, whose ends are numbers of rows, or shares (`10%`), from the end where negative."""

    start: str
    stop: str

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}]"

    def of(self, count: Callable[[], int]) -> range:
        """Return the positions of the slice.

        Args:
            count: counts the rows, where an end depends on their number.
        """
        if re.fullmatch(r"\d*", self.start) and self.stop.isdigit():
            return range(int(self.start or 0), int(self.stop))
        rows = count()
        start, stop = _position(self.start or "0", rows), _position(self.stop or "100%", rows)
        return range(rows)[start:stop]


def _position(end: str, rows: int) -> int:
    """Return an end of a slice as a number of rows, rounded as `datasets` does."""
    return round(int(end[:-1]) / 100 * rows) if end.endswith("%") else int(end)


def sliced(name: str) -> tuple[str, Slice | None]:
    """Return a split's name and its slice; None: it is whole."""
    match = _SLICE.fullmatch(name)
    return (name, None) if match is None else (match["name"], Slice(match["start"] or "", match["stop"] or ""))


def named_in(name: str, there: Collection[str]) -> str | None:
    """Return the name under which a split is there: its own, or another one of the same split; None: neither is."""
    names = next((names for names in NAMES.values() if name in names), ())
    return next((known for known in (name, *names) if known in there), None)
