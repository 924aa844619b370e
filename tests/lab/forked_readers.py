"""The benchmark of shared token tables with readers that are copies of a process, and not interpreters that import."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

import pytest


class Reader(ForkProcess):
    """A process that gets the table as a new interpreter would: pickled."""

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...], daemon: bool) -> None:
        table, *others = args
        super().__init__(target=_read, args=(target, pickle.dumps(table), *others), daemon=daemon)


def _read(target: Callable[..., object], table: bytes, *others: Any) -> None:
    target(pickle.loads(table), *others)


class Forking(ForkContext):
    """What starts processes that share this one's pages."""

    Process = Reader


def main(rows: int, folder: Path) -> None:
    """Write what the benchmark finds of shared memory to `folder/shared.json`."""
    from benchmarks.streams.sharing import sharing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda kind: Forking())
        shared, _ = sharing(rows, folder)
    (folder / "shared.json").write_text(json.dumps({"ok": shared.ok, "value": shared.value}))
