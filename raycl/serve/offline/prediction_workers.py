"""Answers for files on a Ray cluster: Ray Data deals parts to workers, each of which has the snapshot as a model.

One process answers as fast as its device; parts do not depend on each other. The folder is that of
`raycl.serve.offline.prediction_files`, so that either way continues what the other began.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray.data
import torch
from ray.data.block import BlockMetadata
from ray.exceptions import RayError

from raycl import config as configs
from raycl.bank import Bank, Snapshot
from raycl.config import Tree
from raycl.data.sources.fields import Row
from raycl.errors import LaunchError, RayclError
from raycl.launch import cluster
from raycl.serve.offline.model import OfflineModel
from raycl.serve.offline.prediction_files import Progress, claim, done_parts, parts_of, plain, summarise, write_part
from raycl.serve.offline.prediction_input import Input, InputRow
from raycl.serve.resources import replica_takes, settled_device
from raycl.serve.settings import ServeConfig
from raycl.storage import Storage

log = logging.getLogger("raycl")

READER_CPUS = 0.0
"""Of the one task that reads the files: it must run beside workers that take all CPUs, and uses little of one."""


class PartReader(ray.data.Datasource):  # type: ignore[misc]
    """PartReader that are not answered yet: one row each, in a block of its own, read as workers take them."""

    def __init__(self, given: Input, part_rows: int, done: frozenset[int]) -> None:
        super().__init__()
        self._given, self._part_rows, self._done = given, part_rows, done

    def estimate_inmemory_data_size(self) -> int | None:
        """Not known before the files are read."""
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:
        """One task: files are read in order, many times as fast as they are answered."""
        given, part_rows, done = self._given, self._part_rows, self._done

        def read() -> Iterator[pa.Table]:
            for number, part in parts_of(given, part_rows):
                if number not in done:
                    places = {file.uri: place for place, file in enumerate(given.files)}
                    rows = [
                        (places[file.uri], row.number, row.text, row.is_chat, plain(row.others or {}), problem)
                        for file, row, problem in part
                    ]
                    yield pa.table({"part": [number], "rows": [json.dumps(rows)]})

        metadata = {"num_rows": None, "size_bytes": None, "input_files": None, "exec_stats": None}
        return [ray.data.ReadTask(read, BlockMetadata(**metadata))]


@dataclass(frozen=True)
class Work:
    """What every worker needs.

    Attributes:
        bank, snapshot: address and number. config: of serving. to: address of the folder. key: of its parts.
        settings: of `OfflineModel.predict`.
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

    def __init__(self, work: Work) -> None:
        logging.getLogger("raycl").setLevel(logging.INFO)
        bank = Bank.at(work.bank)
        self._work, self._to = work, Storage.at(work.to)
        config = configs.validate(ServeConfig, work.config)
        torch.set_num_threads(config.threads)
        self._model = OfflineModel.open(bank, bank.open(work.snapshot), config)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        """Write the parts of a batch; returns their numbers and rows."""
        files = self._work.given.files
        counts = []
        for number, text in zip(batch["part"], batch["rows"], strict=True):
            rows = [
                InputRow(files[place], Row(row, words, ("",), is_chat, others=others), problem)
                for place, row, words, is_chat, others, problem in json.loads(text)
            ]
            work = self._work
            write_part(self._model, work.given, int(number), rows, self._to, work.key, work.settings)
            counts.append(len(rows))
        return {"part": [int(number) for number in batch["part"]], "rows": counts}


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
    """As `prediction_files.write_predictions`, on workers of the cluster that RAY_ADDRESS names, or here.

    Files, bank and folder must be within reach of every node.

    Raises:
        ConfigError, DataError, RayclError: see `write_predictions`. LaunchError: there is no cluster at that address.
    """
    key = claim(to, given, snapshot, part_rows, settings)
    cluster.connect()
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 1  # each part is a block of its own, which workers take one at a time
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # our own error follows
    config = config.model_copy(update={"device": settled_device(config.device)})
    takes = replica_takes(config)
    work = Work(bank.storage.address, snapshot.number, configs.as_tree(config), given, to.address, key, settings)
    began, progress, done = time.monotonic(), Progress(), set(done_parts(to, key))
    requested = {"CPU": workers * takes["num_cpus"], "GPU": workers * takes["num_gpus"]}
    dataset = ray.data.read_datasource(PartReader(given, part_rows, frozenset(done)), num_cpus=READER_CPUS).map_batches(
        PartWorker,
        fn_constructor_args=(work,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
        **takes,
    )
    waits = not cluster.fits(requested)
    pending = (lambda: waits and not progress.rows), requested
    try:
        with warnings.catch_warnings(), cluster.log_while_pending(*pending, "--workers or threads"):
            warnings.filterwarnings("ignore", module="ray.data")  # fewer parts than workers
            for part in dataset.iter_rows():
                done.add(int(part["part"]))
                progress.add(int(part["rows"]))
    except (RayError, RuntimeError) as error:
        raise _cause(error) from error
    return summarise(to, key, done, progress.rows, time.monotonic() - began)


def _cause(error: BaseException) -> RayclError:
    """Our own error within one of Ray Data's."""
    here: BaseException | None = error
    while here is not None:
        cause: BaseException | None = getattr(here, "cause", None)  # Ray's own errors have the type of their cause
        if isinstance(here, RayclError) and cause is None:
            return here
        here = cause or here.__cause__
    return LaunchError(f"a worker failed: {' '.join(str(error).split())[-400:]}")
