"""A stream with `eval.mode=overlap` beside the same stream with evaluation inline: wall-clock, and the same scores.

Both runs have one worker with the same CPUs, and overlap has a process more, so where a machine has no CPU to spare for
it, its time shows what sharing costs. Runs alternate. Wall-clock is that of the worker, from its claim on the run to
its last record: Ray's start is left out, loading and that of the process that scores are not.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.figures import Figure
from raycl import config as configs
from raycl.launch import driver
from raycl.run.config import RunConfig

log = logging.getLogger(__name__)

MODES = ("inline", "overlap")


def overlap_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Rounds of both modes on one Ray."""
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder, driver.cluster(_config(options, "inline", folder, "")):
        for number in range(options.rounds):
            for mode in MODES:
                config = _config(options, mode, folder, f"{mode}-{number}")
                results[mode].append(driver.train(driver.prepare(config)))
            log.info("round %d: %.1f s, overlap %.1f s", number + 1, *(results[mode][-1]["wall_s"] for mode in MODES))
    for mode, found in results.items():
        wall = median(tree["wall_s"] for tree in found)
        yield Figure(f"eval.mode={mode}: wall-clock", wall, "s", detail=_spent(found))
    ratios = [mine["wall_s"] / other["wall_s"] for other, mine in zip(*results.values(), strict=True)]
    yield Figure("overlap's wall-clock over inline's", median(ratios), "x", detail=f"median of {len(ratios)} rounds")
    differ = sum(mine["matrix"] != other["matrix"] for other, mine in zip(*results.values(), strict=True))
    yield Figure("matrices that differ", differ, "", 0, detail=f"of {len(ratios)}")


def learned_by_lora(options: argparse.Namespace) -> dict[str, Any]:
    """Sections of a run that learns the tasks with LoRA until its answers end, with the sizes of the flags."""
    return {
        "stream": {
            "name": "superni",
            "root": str(options.data),
            "tasks": options.tasks,
            "prompt": "superni",
            "test_rows": options.rows,
            "max_source_tokens": options.source_tokens,
            "max_target_tokens": options.target_tokens,
        },
        "backbone": {"name": options.backbone, "dtype": options.dtype},
        "method": "lora",
        "train": {"max_steps": options.steps, "epochs": 1000, "batch_size": 8, "learning_rate": 3e-3},
    }


def _spent(results: list[dict[str, Any]]) -> str:
    sums = {
        key: median(sum(one[key] for one in tree["phase_times"]) for tree in results) for key in ("train_s", "eval_s")
    }
    return f"training {sums['train_s']:.1f} s, evaluation {sums['eval_s']:.1f} s"


def _config(options: argparse.Namespace, mode: str, folder: str, name: str) -> RunConfig:
    tree: dict[str, Any] = {
        **learned_by_lora(options),
        "eval": {"batch_size": options.batch_size, "mode": mode},
        "launch": {"cpus_per_worker": 1, "max_failures": 0},
        "output": {"dir": folder, **({"name": name} if name else {})},
    }
    return configs.validate(RunConfig, tree)
