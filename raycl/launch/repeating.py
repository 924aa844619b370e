"""Work that a thread repeats while something else goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(work: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Call `work` every so many seconds while this is open.

    Args:
        work: function that must not raise. name: name of the thread.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
