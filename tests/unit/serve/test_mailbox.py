"""Events cross from the engine's thread to the event loop in order, none lost, and many with one wake-up."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from raycl.generation.requests import Event, TextDelta
from raycl.serve.service.service import EventQueues


def test_a_burst_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        woken: list[Any] = []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *what: (woken.append(what), wake(*what)))
        mailbox, queues = EventQueues(loop), [asyncio.Queue[Event]() for _ in range(20)]
        for queue in queues:
            mailbox.post(queue, TextDelta("a", 1))
        assert [(await queue.get()) for queue in queues] == [TextDelta("a", 1)] * 20
        assert len(woken) == 1

    asyncio.run(main())


def test_no_message_is_lost_under_concurrency() -> None:
    async def main() -> None:
        mailbox, queues = EventQueues(asyncio.get_running_loop()), [asyncio.Queue[Event]() for _ in range(4)]

        def post(queue: asyncio.Queue[Event]) -> None:
            for number in range(500):
                mailbox.post(queue, TextDelta("", number))

        threads = [threading.Thread(target=partial(post, queue)) for queue in queues]
        for thread in threads:
            thread.start()
        for queue in queues:
            result = [await asyncio.wait_for(queue.get(), 30) for _ in range(500)]
            assert result == [TextDelta("", number) for number in range(500)]

    asyncio.run(main())


def test_a_closed_loop_drops_messages_without_errors() -> None:
    loop = asyncio.new_event_loop()
    mailbox = EventQueues(loop)
    loop.close()
    mailbox.post(asyncio.Queue(), TextDelta("", 1))
