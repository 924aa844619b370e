"""A run in whose middle a test acts, through the run's tracker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tiny import Done

from raycl.launch import prepared_run
from raycl.storage import Storage
from raycl.training import assembly
from raycl.training.records.recorder import Listeners
from raycl.training.setup.run_config import RunConfig
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.control import HEARTBEAT, Control
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.stopping import HostStop


class At:
    """A tracker that calls `act` once `step` optimizer steps of the run are done."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def log(self, axis: str, at: int, metrics: dict[str, float]) -> None:
        if at == self.step and "train/loss" in metrics:
            self.act()

    def table(self, task: int, name: str, columns: object, rows: object) -> None:
        """Nothing happens at a table."""

    def picture(self, task: int, name: str, file: object) -> None:
        """Nothing happens at a picture."""


def learn(
    config: RunConfig, storage: Storage, step: int, act: Callable[[], None], host: HostStop | None = None
) -> None:
    """Run as a worker does, with `act` after so many optimizer steps; `host` can stop it."""
    alone = DistributedContext.alone(torch.device("cpu"))
    context, open_engine = assembly.build(config, alone)
    with Control(storage, alone, "mine", poll_s=0.0, host=host, beat_s=0.02) as control:
        StreamLoop(context, open_engine, storage, alone, Listeners([At(step, act)]), control).run()


def started(done: Done, folder: Path | str) -> tuple[RunConfig, Storage]:
    """Return the same run below another folder, prepared."""
    output = done.config.output.model_copy(update={"dir": str(folder), "name": "mine"})
    train = done.config.train.model_copy(update={"log_every_s": 0.001})
    prepared = prepared_run.prepare(done.config.model_copy(update={"output": output, "train": train}))
    return prepared.config, prepared.storage


def age_heartbeat(storage: Storage) -> None:
    """Date a run's last heartbeat a minute back, as a process leaves it that was killed then."""
    heartbeat = storage.read_json(HEARTBEAT)
    storage.write_json(HEARTBEAT, {**heartbeat, "time": heartbeat["time"] - 60})
