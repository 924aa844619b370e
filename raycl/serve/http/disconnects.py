"""Cancels a request when its client disconnects, whole answers as well as streams.

Frameworks notice that a client has gone only when they write to it, and until then a text is generated in vain.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


async def cancel_on_disconnect(app: Any, scope: Any, body: bytes, receive: Any, send: Any) -> None:
    """Run an ASGI application on a body that has been read; cancelled if the client leaves before the answer's end.

    Args:
        receive: the server's function after the body; nothing else may read from it.
    """
    given, gone, answered = False, asyncio.Event(), False

    async def replayed() -> Any:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watched(message: Any) -> None:
        nonlocal answered
        await send(message)
        answered = message["type"] == "http.response.body" and not message.get("more_body", False)

    work = asyncio.ensure_future(app(scope, replayed, watched))
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and not work.done():
            gone.set()
            if not answered:
                work.cancel()
        with suppress(asyncio.CancelledError):
            await work
    finally:
        watch.cancel()
        if not work.done():  # we are cancelled ourselves
            work.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
