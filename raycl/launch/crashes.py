"""Exceptions of a worker that are none of ours, and where errors of ours are left for the process that started it."""

import socket
import time
import traceback
from dataclasses import dataclass
from typing import Any

from raycl.config import Tree
from raycl.errors import RayclError, RunError
from raycl.storage import Storage
from raycl.training.workers.control import Control
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.memory import is_out_of_memory, out_of_memory

SETUP = ("starting", "preparing")
"""Activities before a phase's first step."""


def error_file(driver: str) -> str:
    """Return the file in a run's storage in which an error of ours is left for its driver."""
    return f"errors/{driver}.json"


def leave_error(storage: Storage, driver: str, error: Exception) -> None:
    """Write what ended a run's workers for their driver, and for the status of the run."""
    record = {"type": type(error).__name__, "message": str(error), "time": time.time()}
    storage.write_json(error_file(driver), record)


@dataclass(frozen=True)
class Crashes:
    """Makes exceptions that end this worker errors of ours where a restart cannot help.

    Memory that does not suffice is an error with what to lower. Where workers are started again, from the last
    checkpoint, an exception that came back at the same step would come back each time; one of the set-up is not tried
    again at all.

    Attributes:
        config: tree of the run's config. restarts: a worker that fails is started again.
    """

    storage: Storage
    world: DistributedContext
    control: Control
    config: Tree
    restarts: bool

    def at_exit(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the error of ours that an exception is, if it is one, as the `__exit__` of a context would."""
        if not isinstance(error, Exception) or isinstance(error, RayclError):
            return
        if isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error):
            world = self.world
            where = f"worker {world.rank + 1} of {world.size} on {socket.gethostname()}, {world.device.type.upper()}"
            raise RunError(out_of_memory(self.control.activity, self.config, world.size, where)) from error
        if self.restarts:
            self._refuse_again(error)

    def _refuse_again(self, error: Exception) -> None:
        """Record an exception, and raise an error of ours instead if it would come back."""
        frames = traceback.extract_tb(error.__traceback__)
        if self.world.size > 1 and "/torch/distributed/" in frames[-1].filename:
            return  # another worker is gone
        at = f"{frames[-1].filename}:{frames[-1].lineno}"
        crash = {
            "type": type(error).__name__,
            "at": at,
            "position": self.control.position,
            "rows": self.control.failed_rows,
        }
        file = f"errors/crash-{self.world.rank}.json"
        before = self.storage.read_json(file) if self.storage.exists(file) else {}
        self.storage.write_json(file, {**crash, "message": str(error), "time": time.time()})
        again = crash == {key: before.get(key) for key in crash}
        if not again and not _is_of_setup(error, self.control.activity):
            return
        ours = [f"{frame.filename}:{frame.lineno}" for frame in frames if "/raycl/" in frame.filename][-1:]
        called = f", called at {ours[0]}" if ours and ours[0] != at else ""
        rows = f", in a micro-batch of {', '.join(self.control.failed_rows)}" if self.control.failed_rows else ""
        raise RunError(
            f"{type(error).__name__}: {error} (at {at}{called}), {'twice ' if again else ''}while "
            f"{_described(self.control.position)}{rows}: it would come back, so it is not tried again; mend its cause "
            "first"
        ) from error


def _is_of_setup(error: Exception, activity: str) -> bool:
    """Return whether an exception comes from modules, config or data; stores, devices and networks may fail once."""
    if isinstance(error, ImportError | SyntaxError):
        return True
    return activity in SETUP and not isinstance(error, OSError | RuntimeError)


def _described(position: dict[str, Any]) -> str:
    task = f" task '{position['task']}'" if "task" in position else ""
    step = f" after step {position['step']}" if position["activity"] == "training" and "step" in position else ""
    return f"{position['activity']}{task}{step}"
