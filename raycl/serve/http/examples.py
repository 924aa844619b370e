"""Examples of the texts of served tasks, for the playground: rows of their data that they were not trained on."""

import logging
import threading

from raycl.bank import Snapshot
from raycl.data.stream import Stream
from raycl.errors import RayclError
from raycl.serve.gate.earlier_rows import stream_of
from raycl.serve.settings import ServeConfig
from raycl.types import Task

log: logging.Logger = logging.getLogger(__name__)

DEFAULT = 2
"""Examples of each task where the setting is null and only this machine is answered."""

LONGEST = 600
"""Characters of an example: a longer text is not taken."""

READ = 50
"""Rows of a task that are looked at."""


class Examples:
    """Reads the examples of one snapshot at a time, and keeps those of the last one.

    Args:
        has_keys: others than this machine may be answered.
    """

    def __init__(self, config: ServeConfig, has_keys: bool) -> None:
        self._config = config
        self._count = config.examples if config.examples is not None else 0 if has_keys else DEFAULT
        self._lock = threading.Lock()
        self._read: tuple[str, dict[str, list[str]]] = ("", {})

    def of(self, snapshot: Snapshot) -> dict[str, list[str]]:
        """Return task -> texts; nothing where none are wanted, or the data cannot be read here."""
        if not self._count:
            return {}
        with self._lock:
            if self._read[0] != snapshot.sha256:
                self._read = (snapshot.sha256, self._texts(snapshot))
            return self._read[1]

    def _texts(self, snapshot: Snapshot) -> dict[str, list[str]]:
        try:
            stream = stream_of(snapshot, self._config)
            learned = {task.name for task in snapshot.tasks}
            return {task.name: self._of_task(stream, task) for task in stream.tasks if task.name in learned}
        except RayclError as error:
            log.info("the playground shows no examples: %s", error)
            return {}

    def _of_task(self, stream: Stream, task: Task) -> list[str]:
        """Return the first test texts that are not too long."""
        source = stream.source(task, "test")
        if source is None or stream.is_chat(task):
            return []
        texts = source.open().values("text", stream.rows(task, "test")[:READ])
        return [text for text in texts if text.strip() and len(text) <= LONGEST][: self._count]
