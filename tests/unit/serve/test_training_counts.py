"""Counts of the rows that the tasks were learned from."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from raycl.errors import BankError, RayclError
from raycl.serve.errors import BusyError
from raycl.serve.http.drift import TrainingCounts


@pytest.mark.parametrize(("error", "again"), [(BusyError("7 requests are pending"), True), (BankError("gone"), False)])
def test_a_count_is_tried_again_where_the_endpoint_was_busy(
    monkeypatch: pytest.MonkeyPatch, error: RayclError, again: bool
) -> None:
    active = SimpleNamespace(snapshot=SimpleNamespace(sha256="a"))
    service: Any = SimpleNamespace(snapshot_manager=SimpleNamespace(active=active))
    counts, failures = TrainingCounts(service), [error]

    async def count() -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return {}

    async def states() -> list[str]:
        seen = []
        for _ in range(4):
            seen.append(counts.state()["state"])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return seen

    monkeypatch.setattr(counts, "_counts", count)
    assert asyncio.run(states()) == ["counting", "missing", *(["counting", "ready"] if again else ["missing"] * 2)]
