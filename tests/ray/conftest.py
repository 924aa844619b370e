"""What tests need that start Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worker_server import WorkerServer


@pytest.fixture(scope="session", autouse=True)
def worker_server() -> Iterator[None]:
    """Ray's workers of this session start as copies of a process that has imported the libraries."""
    with pytest.MonkeyPatch.context() as patch:
        server = WorkerServer(patch)
        yield
        server.close()
