"""One of two workers of a run with generated pseudo-samples, where the generators of both write different texts.

Called as `two_generators.py RANK RENDEZVOUS_FILE FOLDER`; FOLDER holds config.json, gets the run and `<rank>.json`.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import run

from raycl import config as configs
from raycl.methods.sapt.generator import Generator
from raycl.methods.sapt.sapt import Sapt
from raycl.run.config import RunConfig
from raycl.storage import Storage
from raycl.training.distributed import DistributedContext


def main(rank: int, rendezvous: str, folder: Path) -> None:
    """Run, and write the ids that this worker keeps for each task."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    texts = ["fire is warm", "the sky runs"][rank : rank + 1]
    pytest.MonkeyPatch().setattr(Generator, "_sample", lambda self, start, count: texts * count)
    config = configs.validate(RunConfig, json.loads((folder / "config.json").read_text()))
    done = run(config, Storage.at(folder / "run"), world=DistributedContext(rank, 2, rank, torch.device("cpu")))
    method = done.context.method
    assert isinstance(method, Sapt)
    kept = {task: memory.samples.sources for task, memory in method.reflection.entries.items()}
    (folder / f"{rank}.json").write_text(json.dumps(kept))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
