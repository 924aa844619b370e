"""Answers for files on a Ray cluster: parts go to workers that have time, each with the snapshot as its model.

One process answers as fast as its device; parts do not depend on each other. The folder is that of
`raycl.serve.offline.prediction_files`, so that either way continues what the other began.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from raycl import config as configs
from raycl.bank import Bank, Snapshot
from raycl.config import Tree
from raycl.errors import LaunchError, RayclError
from raycl.launch import cluster
from raycl.serve.offline.model import OfflineModel
from raycl.serve.offline.prediction_files import PredictionProgress, claim, done_parts, parts_of, summarise, write_part
from raycl.serve.offline.prediction_input import Input, InputRow
from raycl.serve.resources import replica_takes, settled_device
from raycl.serve.settings import ServeConfig
from raycl.storage import Storage

RESTARTS = 3
"""Restarts of a worker whose process dies; its part is answered again."""


@dataclass(frozen=True)
class PredictionWork:
    """The inputs of every worker.

    Attributes:
        bank, snapshot: address and number. config: serving config. to: address of the folder. key: key of its parts.
        settings: settings of `OfflineModel.predict`.
    """

    bank: str
    snapshot: int
    config: Tree
    given: Input
    to: str
    key: str
    settings: Tree


class PartWorker:
    """Answers parts with a model of its own."""

    def __init__(self, work: PredictionWork) -> None:
        self._work, self._to = work, Storage.at(work.to)
        self._model: OfflineModel | None = None

    def open(self) -> None:
        """Load the model.

        Raises:
            RayclError: bank or backbone cannot be used.
        """
        logging.getLogger("raycl").setLevel(logging.INFO)
        bank, config = Bank.at(self._work.bank), configs.validate(ServeConfig, self._work.config)
        torch.set_num_threads(config.threads)
        self._model = OfflineModel.open(bank, bank.open(self._work.snapshot), config)

    def write(self, number: int, part: list[InputRow]) -> tuple[int, int]:
        """Write one part; returns its number and rows."""
        if self._model is None:  # the process was started again
            self.open()
        assert self._model is not None, "the model is open"
        write_part(self._model, self._work.given, number, part, self._to, self._work.key, self._work.settings)
        return number, len(part)


def write_on_workers(
    bank: Bank,
    snapshot: Snapshot,
    config: ServeConfig,
    given: Input,
    to: Storage,
    workers: int,
    part_rows: int,
    **settings: Any,
) -> Tree:
    """Answer as `prediction_files.write_predictions` does, on workers of the cluster that RAY_ADDRESS names, or here.

    Files, bank and folder must be within reach of every node.

    Raises:
        ConfigError, DataError, RayclError: see `write_predictions`. LaunchError: there is no cluster at that address.
    """
    key = claim(to, given, snapshot, part_rows, settings)
    cluster.connect()
    config = config.model_copy(update={"device": settled_device(config.device)})
    takes = replica_takes(config)
    work = PredictionWork(
        bank.storage.address, snapshot.number, configs.as_tree(config), given, to.address, key, settings
    )
    began, progress, done = time.monotonic(), PredictionProgress(), set(done_parts(to, key))
    requested = {"CPU": workers * takes["num_cpus"], "GPU": workers * takes["num_gpus"]}
    waits = not cluster.fits(requested)
    options = {**takes, "max_restarts": RESTARTS, "max_task_retries": RESTARTS}
    actors = [ray.remote(PartWorker).options(**options).remote(work) for _ in range(workers)]
    left = ((number, part) for number, part in parts_of(given, part_rows) if number not in done)
    pending = (lambda: waits and not progress.rows), requested
    try:
        with cluster.log_while_pending(*pending, "--workers or threads"):
            for number, rows in _written(actors, left):
                done.add(number)
                progress.add(rows)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, RayclError) else _failed(error)) from error
    except RayError as error:
        raise _failed(error) from error
    finally:
        for actor in actors:
            ray.kill(actor)
    return summarise(to, key, done, progress.rows, time.monotonic() - began)


def _written(actors: list[Any], parts: Iterator[tuple[int, list[InputRow]]]) -> Iterator[tuple[int, int]]:
    """Yield number and rows of each part when it is written; a worker has one at a time, once its model is loaded."""
    busy = {actor.open.remote(): actor for actor in actors}
    left, missing = next(parts, None), 0
    while left is not None or missing:
        (ready,), _ = ray.wait(list(busy), num_returns=1)
        actor, written = busy.pop(ready), ray.get(ready)
        if written is not None:
            missing -= 1
            yield written
        if left is not None:
            busy[actor.write.remote(*left)] = actor
            left, missing = next(parts, None), missing + 1


def _failed(error: RayError) -> LaunchError:
    return LaunchError(f"a worker failed: {' '.join(str(error).split())[-400:]}")
