"""One of two workers on this machine: runs a list of jobs one after another over gloo, without Ray."""

from __future__ import annotations

import gc
import json
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from reading_once import reading_once
from tiny import Stop, run

from raycl import config as configs
from raycl.errors import RayclError
from raycl.storage import Storage
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext


def joined(rank: int, rendezvous: Path) -> DistributedContext:
    """Return the place of `rank` in a group of two."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    return DistributedContext(rank, 2, rank, torch.device("cpu"))


def main(rank: int, rendezvous: Path, jobs: Path) -> None:
    """Run every job `{"tree", "folder", "after"}`; `after` steps end it as a crash would.

    With `"views"`, each rank reads a run directory of its own, `folder/RANK`, and leaves an error of ours there.
    """
    world = joined(rank, rendezvous)
    for job in json.loads(jobs.read_text()):
        config = configs.validate(RunConfig, job["tree"])
        views = job.get("views", False)
        folder = Path(job["folder"]) / str(rank) if views else Path(job["folder"])
        gc.freeze()  # closed engines collect garbage: what the libraries made on import is none
        try:
            with suppress(Stop), reading_once():
                run(config, Storage.at(folder), after=job["after"], world=world)
        except RayclError as error:
            if not views:
                raise
            (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
