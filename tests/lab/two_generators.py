"""One of two workers of a run with generated pseudo-samples, where the generators of both write different texts.

The folder holds config.json, gets the run and `<rank>.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from tiny import run
from two_workers import joined

from raycl import config as configs
from raycl.methods.pseudo_samples.generator import Generator
from raycl.methods.sapt.sapt import Sapt
from raycl.storage import Storage
from raycl.training.setup.run_config import RunConfig


def main(rank: int, rendezvous: Path, folder: Path) -> None:
    """Run, and write the ids that this worker keeps for each task."""
    world = joined(rank, rendezvous)
    texts = ["fire is warm", "the sky runs"][rank : rank + 1]
    pytest.MonkeyPatch().setattr(
        Generator, "_sample", lambda self, start, count, like: [("", text) for text in texts * count]
    )
    config = configs.validate(RunConfig, json.loads((folder / "config.json").read_text()))
    done = run(config, Storage.at(folder / "run"), world=world)
    method = done.context.method
    assert isinstance(method, Sapt)
    kept = {task: samples.sources for task, samples in method.reflection.samples.items()}
    (folder / f"{rank}.json").write_text(json.dumps(kept))
    dist.destroy_process_group()
