"""raycl through Ray Train against a plain PyTorch loop: the same backbone, rows, batches, steps and evaluations.

Trials alternate (plain, raycl, plain, raycl, ...), so that a machine that slows down slows both, and every trial is a
fresh process with a cold cache, the same number of torch threads and the same priority. The largest difference of the
loss traces and the share of different answers show whether both did the same work.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Figure, Report, measured
from benchmarks.streams.reader import SMAPS
from benchmarks.streams.sharing import sharing
from benchmarks.streams.trials import Trial, Typical, run_plain, run_raycl
from benchmarks.streams.worksheet import write_down
from raycl import config as configs
from raycl.training.setup.run_config import RunConfig

log = logging.getLogger("benchmarks")

ENGINES: dict[str, dict[str, Any]] = {"torch": {"name": "torch"}, "deepspeed": {"name": "deepspeed", "zero_stage": 2}}
FOLDERS = ("mini-t5", "mini-llama")
"""Backbones besides the packaged MiniLM, by the name of their folder."""

PLAIN = "plain"
"""Stands for the plain loop where the name of an engine is expected."""

SETTINGS = ("repeats", "threads", "tasks", "rows", "test_rows", "batch_size", "micro_batch_size", "dtype")
"""Flags that a reader of the figures needs."""

STEP_LIMIT, START_LIMIT_S, LOSS_LIMIT, ANSWER_LIMIT = 1.10, 20.0, 1e-4, 0.01
"""Step time over the plain loop's, seconds of Ray's start, difference of losses, and share of answers that differ."""

REPO = Path(__file__).resolve().parents[2]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores."""
    parser.add_argument(
        "--models",
        metavar="FOLDER",
        type=Path,
        help=f"folder that holds {', '.join(FOLDERS)}; None: $RAYCL_SHARED/models, else shared/models beside the "
        "repository",
    )
    parser.add_argument(
        "--backbones", nargs="+", default=["minilm", *FOLDERS], metavar="NAME", help="minilm, or folders in --models"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=list(ENGINES),
        choices=ENGINES,
        help="with one worker; others than torch on the first backbone only",
    )
    parser.add_argument(
        "--workers", nargs="*", type=int, default=[2], help="further worker counts, engine torch, first backbone"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="trials of each kind with one worker, first backbone (others: one)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads, and CPUs, of each worker")
    parser.add_argument("--tasks", nargs="+", default=["topic", "sentiment"], help="of the builtin stream")
    parser.add_argument("--rows", type=int, default=192, help="train rows per task")
    parser.add_argument("--test-rows", type=int, default=64, help="test rows per task")
    parser.add_argument("--batch-size", type=int, default=16, help="rows per optimizer step")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="rows per worker per forward pass")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of the backbone")
    parser.add_argument("--token-rows", type=int, default=20_000, help="rows of the table read by two processes")


@dataclass
class Comparison:
    """All trials on one backbone; kinds are (engine, workers), the plain loop is `PLAIN`."""

    backbone: str
    trials: dict[tuple[str, int], list[Trial]] = field(default_factory=dict)

    def add(self, engine: str, workers: int, trial: Trial) -> None:
        """Keep a trial."""
        self.trials.setdefault((engine, workers), []).append(trial)

    def typical(self, engine: str, workers: int = 1) -> Typical:
        """Return the trials of one kind."""
        return Typical(self.trials[engine, workers])


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    result, notes = backbones(options.backbones, options.models or default_models())
    return measured("stream", options, SETTINGS, lambda: _figures(options, result, notes), notes=notes)


def _figures(options: argparse.Namespace, result: Mapping[str, str], notes: list[str]) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="raycl-bench-") as index:
        folder = Path(index)
        if SMAPS.exists():
            log.info("reading %d token rows in two processes", options.token_rows)
            yield from sharing(options.token_rows, folder)
        else:
            notes.append("no /proc/self/smaps here: shared memory of token files not measured")
        for number, (name, where) in enumerate(result.items()):
            engines = options.engines if number == 0 else [engine for engine in options.engines if engine == "torch"]
            repeats, workers = (options.repeats, options.workers) if number == 0 else (1, [])
            yield from figures_of(compare(name, where, engines, repeats, workers, options, folder))


def default_models() -> Path:
    """Return the folder in which larger backbones are searched."""
    shared = os.environ.get("RAYCL_SHARED")
    return (Path(shared) if shared else REPO.parent / "shared") / "models"


def backbones(names: list[str], models: Path) -> tuple[dict[str, str], list[str]]:
    """Return name -> what `backbone.name` takes, of those that are there; notes about the others."""
    places = {name: name if name == "minilm" else str(models / name) for name in names}
    absent = [name for name, location in places.items() if name != "minilm" and not Path(location).is_dir()]
    notes = [f"{name} left out: there is no folder {models / name} (see --models)" for name in absent]
    return {name: location for name, location in places.items() if name not in absent}, notes


def compare(
    name: str,
    where: str,
    engines: list[str],
    repeats: int,
    workers: list[int],
    options: argparse.Namespace,
    folder: Path,
) -> Comparison:
    """Alternating trials with one worker, then one trial of each further worker count."""
    comparison = Comparison(name)
    numbers = count(1)

    def fresh(engine: str, workers: int) -> RunConfig:
        return config_of(where, engine, workers, options, folder / f"{name}-{next(numbers)}")

    sheet = write_down(fresh("torch", 1), options.threads)
    for repeat in range(repeats):
        log.info("%s: plain loop, trial %d of %d", name, repeat + 1, repeats)
        comparison.add(PLAIN, 1, run_plain(sheet, folder))
        for engine in engines:
            log.info("%s: raycl on engine %s, trial %d of %d", name, engine, repeat + 1, repeats)
            comparison.add(engine, 1, run_raycl(fresh(engine, 1)))
    for count_of_workers in workers:
        log.info("%s: raycl with %d workers", name, count_of_workers)
        comparison.add("torch", count_of_workers, run_raycl(fresh("torch", count_of_workers)))
    return comparison


def config_of(where: str, engine: str, workers: int, options: argparse.Namespace, folder: Path) -> RunConfig:
    """Return the config of a trial's run, with its own folder and cache."""
    tree = {
        "stream": {
            "tasks": options.tasks,
            "train_rows": options.rows,
            "test_rows": options.test_rows,
            "cache_dir": str(folder / "cache"),
        },
        "backbone": {"name": where, "dtype": options.dtype},
        "train": {"epochs": 1, "batch_size": options.batch_size, "micro_batch_size": options.micro_batch_size},
        "engine": ENGINES[engine],
        "eval": {"max_new_tokens": 8},
        "launch": {"workers": workers, "cpus_per_worker": options.threads, "max_failures": 0},
        "output": {"dir": str(folder), "name": "run"},
    }
    return configs.validate(RunConfig, tree)


def figures_of(comparison: Comparison) -> Iterator[Figure]:
    """Yield the figures of the trials on one backbone."""
    plain = comparison.typical(PLAIN)
    for engine, workers in comparison.trials:
        if engine != PLAIN:
            typical = comparison.typical(engine, workers)
            title = f"{comparison.backbone}, {engine}, {workers} worker{'s' if workers > 1 else ''}"
            yield from _same_work(title, typical, plain, strict=workers == 1)
            if workers == 1:
                yield from _ratios(title, typical, plain)
            yield from _cost(title, typical)
    yield from _cost(f"{comparison.backbone}, plain loop", plain)


def _same_work(title: str, mine: Typical, plain: Typical, strict: bool) -> Iterator[Figure]:
    """Yield whether both did the same: worst over all trials.

    Args:
        strict: one worker sums in the plain loop's order; several do not, and training lets rounding grow, so there
            the difference has no target.
    """
    theirs = plain.trials[0]
    losses = max(abs(a - b) for trial in mine.trials for a, b in zip(trial.losses, theirs.losses, strict=True))
    differing = max(sum(a != b for a, b in zip(trial.answers, theirs.answers, strict=True)) for trial in mine.trials)
    steps, rows = len(theirs.losses), len(theirs.answers)
    limits = (LOSS_LIMIT, ANSWER_LIMIT) if strict else (None, None)
    yield Figure(f"{title}: largest difference of the loss traces", losses, "", limits[0], detail=f"{steps} steps")
    share = differing / rows
    yield Figure(f"{title}: answers that differ", share, "", limits[1], detail=f"{differing} of {rows} answers")


def _ratios(title: str, mine: Typical, plain: Typical) -> Iterator[Figure]:
    """Yield the times against the plain loop's."""
    middle = (median(mine.step_s) * 1000, median(plain.step_s) * 1000)
    total = (sum(mine.step_s), sum(plain.step_s))
    evaluated = (mine.of("eval_s"), plain.of("eval_s"))
    wall = (mine.of("wall_s"), plain.of("wall_s"))
    slowest = max(trial.start_s for trial in mine.trials)
    yield _ratio(f"{title}: time per step, median", middle, "ms", STEP_LIMIT)
    yield _ratio(f"{title}: time of all steps", total, "s", STEP_LIMIT)
    yield _ratio(f"{title}: time of evaluation", evaluated, "s")
    yield _ratio(f"{title}: whole run, starts included", wall, "s")
    yield Figure(
        f"{title}: start-up of Ray and the worker",
        mine.of("start_s"),
        "s",
        START_LIMIT_S,
        detail=f"until the model is loaded; slowest trial {slowest:.1f} s",
    )
    yield Figure(f"{title}: outside steps, evaluation, start-up", mine.of("rest_s"), "s", detail="caches cold")


def _ratio(name: str, times: tuple[float, float], unit: str, limit: float | None = None) -> Figure:
    detail = f"{times[0]:.2f} {unit} against {times[1]:.2f} {unit}"
    return Figure(name, times[0] / times[1], "x", limit, detail=detail)


def _cost(title: str, typical: Typical) -> Iterator[Figure]:
    tokens = typical.trials[0].tokens
    yield Figure(f"{title}: tokens per second", typical.tokens_per_s, "/s", detail=f"{tokens:,} tokens in the steps")
    yield Figure(f"{title}: peak memory per worker", typical.of("peak_memory_mb"), "MiB")
