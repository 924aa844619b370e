"""What tests need that start Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from complete_runs import COPIES
from copy_server import CopyServer


@pytest.fixture(scope="session")
def copy_server(pytestconfig: pytest.Config) -> CopyServer:
    server = pytestconfig.stash[COPIES]
    server.wait()
    return server


@pytest.fixture(scope="module", autouse=True)
def copies(copy_server: CopyServer) -> Iterator[None]:
    """Jobs and Ray's processes of tests/ray start as copies of a process that has imported the libraries."""
    with pytest.MonkeyPatch.context() as patch:
        copy_server.set_in(patch)
        yield
