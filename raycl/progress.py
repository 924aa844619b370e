"""Progress of long work, as log records: a command draws them as bars on a terminal, and as a few lines elsewhere."""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

log: logging.Logger = logging.getLogger("raycl.progress")

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Bar:
    """The state of a piece of work: `done` of `total` items are finished.

    Attributes:
        has_lines: log lines say how far it is, so that a bar alone is shown of it.
    """

    what: str
    done: int
    total: int
    has_lines: bool = False


def report(what: str, done: int, total: int, has_lines: bool = False) -> None:
    """Say how far a piece of work is; it has ended where `done` is `total`. See `Bar`."""
    log.debug("%s: %d of %d", what, done, total, extra={"bar": Bar(what, done, total, has_lines)})


def counted_off(items: Collection[ItemT], what: str) -> Iterator[ItemT]:
    """Yield the items, and say after each how far the work is."""
    try:
        for done, item in enumerate(items):
            report(what, done, len(items))
            yield item
    finally:
        report(what, len(items), len(items))
