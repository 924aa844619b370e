"""The lines and progress bars that a command writes to standard error, and calls that a thread repeats beside it."""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from raycl.errors import printable
from raycl.progress import Bar

log = logging.getLogger("raycl")
EVERY_S = 10.0
"""Seconds between two lines about how far a piece of work is, where there is no terminal."""

LOGS = "log"
"""Folder of a run with the log of each attempt."""


@contextmanager
def repeating(work: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
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


def is_log(name: str) -> bool:
    """Return whether a file of `LOGS` is an attempt's, and no editor's or file manager's."""
    return re.fullmatch(r"attempt-\d{4,}\.txt", name) is not None


class PlainFormatter(logging.Formatter):
    """Lines without characters that a terminal obeys."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to(handler: logging.Handler) -> None:
    """Send raycl's own lines, from INFO on, to one place only."""
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


class Lines(logging.Handler):
    """Lines on standard error; of work that takes long, how far it is every `EVERY_S` seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless it says how far a piece of work is and the last one was a moment ago."""
        bar: Bar | None = getattr(record, "bar", None)
        if bar is not None:
            now = time.monotonic()
            if bar.done >= bar.total:
                self._shown.pop(bar.what, None)
                return
            if bar.has_lines or now - self._shown.setdefault(bar.what, now) < EVERY_S:
                return
            self._shown[bar.what] = now
        try:
            sys.stderr.write(f"{self.format(record)}\n")  # as it is now: a caller may have replaced it since
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)


class Bars(logging.Handler):
    """Lines on a terminal, warnings in colour unless NO_COLOR is set, and below them a bar for each piece of work."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns,
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,  # results are no lines above a bar: they stay on standard output
        )
        self._ids: dict[str, TaskID] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line above the bars, or move a bar."""
        bar: Bar | None = getattr(record, "bar", None)
        if bar is None:
            style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
            self._console.print(Text(self.format(record), style=style), soft_wrap=True)
            return
        if bar.done >= bar.total:
            if (ended := self._ids.pop(bar.what, None)) is not None:
                self._progress.remove_task(ended)
            if not self._ids:
                self._progress.stop()
            return
        if bar.what not in self._ids:
            self._ids[bar.what] = self._progress.add_task(printable(bar.what), total=bar.total)
            self._progress.start()
        self._progress.update(self._ids[bar.what], completed=bar.done, total=bar.total)

    def close(self) -> None:
        self._progress.stop()
        super().close()


def stderr_handler(quiet: bool = False) -> logging.Handler:
    """Return a handler that writes lines without decoration to standard error, and progress as a terminal allows.

    Args:
        quiet: only errors are written.
    """
    handler = Bars() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else Lines()
    handler.setFormatter(PlainFormatter("%(message)s"))
    handler.setLevel(logging.ERROR if quiet else logging.DEBUG)
    logging.getLogger("raycl.progress").setLevel(logging.DEBUG)
    return handler


def log_to_stderr(quiet: bool = False) -> None:
    """Log progress lines of this process without decoration."""
    log_to(stderr_handler(quiet))
