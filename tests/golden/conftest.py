"""Models and tokenizers of the laboratory are read from their folders once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def read_once() -> Iterator[None]:
    """Runs of these files get copies of what the first one has read."""
    from reading_once import reading_once

    with reading_once():
        yield
