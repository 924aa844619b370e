"""Progress of workers in other processes, from the files of their run: the lines of its log, and a bar of steps."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from raycl.errors import StorageError
from raycl.launch.console import LOGS, is_log, repeating
from raycl.progress import report
from raycl.storage import Storage
from raycl.training.records.progress import steps_of
from raycl.training.workers.control import HEARTBEAT

log = logging.getLogger("raycl")

FOLLOW_S = 1.0


@contextmanager
def follow(storage: Storage, label: str = "", every_s: float = FOLLOW_S) -> Iterator[None]:
    """Log the workers' progress lines here, each after `label`, and show their steps as a bar.

    Only lines written from now on are logged, and steps of workers that start from now on shown.

    Args:
        every_s: seconds between two looks at the log.
    """
    seen: dict[str, int] = {}

    def fresh(folder: Storage) -> Iterator[str]:
        for name in filter(is_log, folder.list(LOGS)):
            data = folder.read(f"{LOGS}/{name}")
            new, seen[name] = data[seen.get(name, 0) :], len(data)
            yield from new.decode(errors="replace").splitlines()

    def log_new() -> None:
        with suppress(StorageError):  # away for a moment: the next look finds all that was written meanwhile
            for line in fresh(storage.with_retries(0)):
                log.info("%s%s", label, line)
            steps.look(storage.with_retries(0))

    for _ in fresh(storage):
        pass  # earlier lines are not logged again
    steps = StepsBar(storage, label)
    try:
        with repeating(log_new, every_s, "follow"):
            yield
    finally:
        log_new()
        steps.end()


class StepsBar:
    """The bar of a run whose workers are other processes, by their heartbeat."""

    def __init__(self, storage: Storage, label: str) -> None:
        """Show steps of workers that start from now on, each task after `label`."""
        self._label = label
        self._shown = ""
        self._earlier = self._beat(storage)

    def look(self, storage: Storage) -> None:
        """Move the bar, or remove it where no step is taken."""
        beat = self._beat(storage)
        step, steps = beat.get("step", 0), beat.get("steps", 0)
        what = ""
        if beat != self._earlier and beat.get("activity") == "training" and step < steps and "task" in beat:
            what = self._label + steps_of(beat["phase"] + 1, beat["phases"], beat["task"])
        if what != self._shown:
            self.end()
        if what:
            self._shown = what
            report(what, step, steps, has_lines=True)

    def end(self) -> None:
        if self._shown:
            report(self._shown, 1, 1, has_lines=True)
        self._shown = ""

    @staticmethod
    def _beat(storage: Storage) -> dict[str, Any]:
        beat = storage.read_json(HEARTBEAT) if storage.exists(HEARTBEAT) else {}
        return beat if isinstance(beat, dict) else {}
