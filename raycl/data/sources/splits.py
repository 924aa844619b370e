"""Parts of a source that are a split: a slice of its rows, or those that a column gives to the split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raycl.data.sources.fields import SourceRow
from raycl.data.sources.hub import HubSplit
from raycl.data.sources.reading import NamedSource, ReadLimits
from raycl.data.sources.slices import NAMES, Slice
from raycl.data.sources.source import SourceFile, SourceFiles

COLUMN = "split"
"""The column of one file that names each row's split."""


@dataclass(frozen=True)
class SplitPart(NamedSource):
    """Rows of a source that are one split.

    Attributes:
        part: the slice, of rows that can be read; None: all.
        value: the split that the rows' `COLUMN` names, under any of its names; "": the source has no such column.
        is_first: rows that cannot be used and name no split count here; of a source's parts one has them.
    """

    source: SourceFile | SourceFiles | HubSplit
    part: Slice | None = None
    value: str = ""
    is_first: bool = True

    @property
    def name(self) -> str:
        """The name of the source, and of the part in it."""
        return f"{self.source.name}{f' {self.value}' if self.value else ''}{self.part or ''}"

    @property
    def uri(self) -> str:
        return f"{self.source.uri}{f', split {self.value}' if self.value else ''}{self.part or ''}"

    @property
    def limits(self) -> ReadLimits:
        return self.source.limits

    def within(self, limits: ReadLimits) -> SplitPart:
        """Return the same with these limits."""
        return replace(self, source=self.source.within(limits))

    def require(self) -> None:
        """Make sure that the source exists; see `SourceFile.require`."""
        self.source.require()

    def content_hash(self, cache: Path) -> str:
        """Return the SHA-256 in hex of the source's content and the part."""
        described = f"{self.source.content_hash(cache)} {self.value} {self.part} {self.is_first}"
        return hashlib.sha256(described.encode()).hexdigest()

    def counts(self, item: Any) -> bool:
        """Return whether an item that cannot be used is one of this part."""
        named = _split_of(item) if self.value and isinstance(item, Mapping) else ""
        return named in self._values if named else self.is_first

    @property
    def _values(self) -> tuple[str, ...]:
        return next((names for names in NAMES.values() if self.value in names), (self.value,))

    def chosen(self, read: Callable[[], Iterator[SourceRow]]) -> Iterator[SourceRow]:
        """Yield the rows of the part.

        Args:
            read: reads the source's rows, with their other fields where the part goes by a column.

        Raises:
            DataError: no row names the split.
        """
        part = (
            range(0)
            if self.part is None
            else self.part.of(lambda: len({index for index, _ in _items(self._of_split(read()))}))
        )
        for index, row in _items(self._of_split(read())):
            if self.part is None or index in part:
                yield row._replace(others=None)

    def _of_split(self, rows: Iterator[SourceRow]) -> Iterator[SourceRow]:
        if not self.value:
            yield from rows
            return
        found, others = False, dict[str, None]()
        for row in rows:
            value = _split_of(row.others or {})
            if value in self._values:
                found = True
                yield row
            else:
                others[value] = None
        if not found:
            listed = ", ".join(f"'{name}'" for name in list(others)[:10])
            self.source.refuse(
                f"no row has '{self.value}' in its column '{COLUMN}': expected one of {listed}; name another one in "
                "splits, or take test rows from train with splits.test=null and stream.test_fraction"
            )


def _split_of(item: Mapping[str, Any]) -> str:
    value = item.get(COLUMN)
    return "" if value is None else str(value).strip()


def _items(rows: Iterator[SourceRow]) -> Iterator[tuple[int, SourceRow]]:
    """Yield rows with the position of their item, from 0: the turns of a conversation are rows of one."""
    index, last = -1, None
    for row in rows:
        index, last = index + (row.number != last), row.number
        yield index, row
