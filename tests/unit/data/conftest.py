"""Real files and a real tokenizer (the one packaged with MiniLM) for the data tests.

raycl is imported where it is needed: pytest imports this file before it starts the processes that get tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from data_samples import MiniLMCodec, WriteTask

    from raycl.data.stream import Stream


@pytest.fixture(scope="session")
def codec() -> MiniLMCodec:
    from data_samples import MiniLMCodec

    return MiniLMCodec()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache for each test."""
    monkeypatch.setenv("RAYCL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Write a task folder in the NaturalInstructions layout and return its root."""

    def write(
        name: str,
        train: Sequence[tuple[str, Any]],
        test: Sequence[tuple[str, Any]],
        definition: str = "Say which.",
        below: str = "",
        **more: Sequence[tuple[str, Any]],
    ) -> Path:
        folder = tmp_path / "data" / below / name
        folder.mkdir(parents=True)
        for split, rows in {"train": train, "test": test, **more}.items():
            instances = [{"id": str(i), "input": text, "output": output} for i, (text, output) in enumerate(rows)]
            content = {"Definition": [definition] if definition else [], "Instances": instances}
            (folder / f"{split}.json").write_text(json.dumps(content))
        return tmp_path / "data"

    return write


@pytest.fixture
def agnews(write_task: WriteTask) -> Iterator[Stream]:
    """Yield a stream of one task with 100 train and 10 test rows."""
    from data_samples import news, open_agnews

    yield open_agnews(write_task("agnews", news(100), news(10, 100)))
