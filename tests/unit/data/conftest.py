"""Real files and a real tokenizer (the one packaged with MiniLM) for the data tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest
from data_samples import MiniLMCodec, WriteTask, news, open_agnews
from moto.server import ThreadedMotoServer

from raycl.data.stream import Stream


@pytest.fixture(scope="session")
def codec() -> MiniLMCodec:
    return MiniLMCodec()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
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
    """A stream of one task with 100 train and 10 test rows."""
    yield open_agnews(write_task("agnews", news(100), news(10, 100)))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, str]]:
    """A boto3 client of an S3-compatible server on a free loopback port, and the query that finds it."""
    for key, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{key}", value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield boto3.client("s3", endpoint_url=f"http://{host}:{port}"), f"?endpoint_override={host}:{port}&scheme=http"
    server.stop()
