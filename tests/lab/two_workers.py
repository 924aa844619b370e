"""One of several workers on this machine: runs a list of jobs one after another over gloo, without Ray.

Why it exists: importing the libraries takes far longer than the tiny runs, so one pair of processes does them all.
Called as `two_workers.py RANK WORLD_SIZE RENDEZVOUS_FILE JOBS_FILE`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import Stop, run

from raycl import config as configs
from raycl.errors import RayclError
from raycl.run.config import RunConfig
from raycl.storage import Storage
from raycl.training.distributed import DistributedContext


def main(rank: int, size: int, rendezvous: str, jobs: str) -> None:
    """Run every job `{"tree", "folder", "after"}`; `after` steps end it as a crash would.

    With `"views"`, each rank reads a run directory of its own, `folder/RANK`, and leaves an error of ours there.
    """
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    world = DistributedContext(rank, size, rank, torch.device("cpu"))
    for job in json.loads(Path(jobs).read_text()):
        config = configs.validate(RunConfig, job["tree"])
        views = job.get("views", False)
        folder = Path(job["folder"]) / str(rank) if views else Path(job["folder"])
        gc.freeze()  # closed engines collect garbage: what the libraries made on import is none
        try:
            with suppress(Stop):
                run(config, Storage.at(folder), after=job["after"], world=world)
        except RayclError as error:
            if not views:
                raise
            (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
