"""Sweeps: what a trial costs above the same run alone, what ASHA saves, and what trials save that begin alike.

All in one cluster of this machine: the run alone and trials one at a time; then the same grid of learning rates and
ranks over all built-in tasks, whole and with ASHA; then `sweeps/task_orders.yaml`, one and two trials at a time. ASHA
lets the first trials pass, since there is nothing to compare them with; so what it saves depends on their order, and
several orders are tried.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.figures import Figure, Report, measured
from raycl import config as configs
from raycl.launch import driver
from raycl.launch.cluster import joined
from raycl.launch.prepared_run import prepare
from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.operations.sweep.drive import run_sweep
from raycl.operations.sweep.outcome import SweepOutcome
from raycl.training.setup.run_config import RunConfig

log = logging.getLogger("benchmarks")

SHARE, START_S, ASHA_LIMIT, WINNER_LIMIT = 0.10, 8.0, 0.5, 0.5
"""A trial may take 10 % + 8 s more than the run alone; ASHA half the grid's time, its winner at most 0.5 AP behind."""

ORDERS, SHARED_LIMIT = Path(__file__).parent.parent / "sweeps/task_orders.yaml", 0.85
"""A sweep whose trials learn 46 tasks in place of 60, and the share of the time that it may take."""

TASKS = ("topic", "sentiment", "question_type", "intent", "entailment")
RATES, RANKS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3), (2, 4, 8, 16)
SETTINGS = ("rows", "test_rows", "epochs", "method", "repeats", "concurrency", "reduction", "orders", "part")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults take about four minutes on two cores.

    `--part asha --rows 240 --test-rows 200 --epochs 3` takes half an hour.
    """
    parser.add_argument("--rows", type=int, default=160, help="train rows per task")
    parser.add_argument("--test-rows", type=int, default=60, help="test rows per task")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--method",
        default="slm",
        help="what is swept; where a method forgets, the AP after one task predicts little of the AP at the end",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs alone, and trials, that overhead is measured on")
    parser.add_argument("--concurrency", type=int, default=2, help="trials at a time, grid and ASHA")
    parser.add_argument("--reduction", type=float, default=8, help="ASHA: one trial in so many learns all tasks")
    parser.add_argument(
        "--orders", type=int, default=2, choices=range(1, 11), help="ASHA: so often, with the trials in another order"
    )
    parser.add_argument(
        "--part",
        choices=["overhead", "asha", "prefixes"],
        default="overhead",
        help="asha: 20 trials, 1 + orders times; prefixes: 12 trials, four times, 6 minutes with 48 and 30 rows",
    )


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    return measured("sweep", options, SETTINGS, lambda: _figures(options))


def _figures(options: argparse.Namespace) -> Iterator[Figure]:
    with (
        tempfile.TemporaryDirectory(prefix="raycl-bench-") as folder,
        joined(base(options).launch.address, dashboard=True),
    ):
        parts = {"overhead": overhead, "asha": against_grid, "prefixes": prefixes}
        yield from parts[options.part](options, Path(folder))


def tree(options: argparse.Namespace, tasks: tuple[str, ...]) -> dict[str, Any]:
    """Return what all runs here share."""
    stream = {"tasks": list(tasks), "train_rows": options.rows, "test_rows": options.test_rows, "max_source_tokens": 48}
    train = {"epochs": options.epochs, "batch_size": 16, "lr_scheduler": "linear"}
    launch = {"workers": 1, "cpus_per_worker": 1.0}
    return {"method": options.method, "stream": stream, "train": train, "launch": launch}


def base(options: argparse.Namespace) -> RunConfig:
    """Return the run alone, of two tasks."""
    return configs.validate(RunConfig, tree(options, TASKS[:2]))


def overhead(options: argparse.Namespace, folder: Path) -> Iterator[Figure]:
    """Yield runs alone and trials alternate, so that a machine that slows down slows both."""
    alone, trials = [], []
    for number in range(options.repeats):
        log.info("run alone, then as a trial: %d of %d", number + 1, options.repeats)
        own = {**tree(options, TASKS[:2]), "seed": number, "output": {"dir": str(folder), "name": f"alone-{number}"}}
        began = time.monotonic()
        driver.train(prepare(configs.validate(RunConfig, own)))
        alone.append(time.monotonic() - began)
        space = {"seed": {"grid": [number]}}
        item = {"name": f"one-{number}", "base": tree(options, TASKS[:2]), "space": space, "search": "grid"}
        began = time.monotonic()
        run_sweep(configs.validate(SweepConfig, item), str(folder))
        trials.append(time.monotonic() - began)
    mine, theirs = median(trials), median(alone)
    detail = f"{mine:.1f} s as a sweep of one trial against {theirs:.1f} s alone; {len(alone)} of each"
    yield Figure("a trial above the run alone", mine - theirs, "s", SHARE * theirs + START_S, detail=detail)


def against_grid(options: argparse.Namespace, folder: Path) -> Iterator[Figure]:
    """Yield the same twenty trials: all of them to the end, and with ASHA in several orders."""
    whole, whole_s = _swept("grid", "none", 0, options, folder)
    halved = [_swept(f"asha{order}", "asha", order, options, folder) for order in range(options.orders)]
    spent = [f"{seconds:.0f} s, {_learned(outcome)} tasks" for outcome, seconds in halved]
    detail = f"{'; '.join(spent)}; against {whole_s:.0f} s, {_learned(whole)} tasks"
    yield Figure("ASHA's time against the grid's", mean(s for _, s in halved) / whole_s, "x", ASHA_LIMIT, detail=detail)
    best = _score(whole, whole.best)
    behind = [best - _score(outcome, outcome.best) for outcome, _ in halved]
    winners = [_settings(outcome, outcome.best) for outcome in (whole, *(outcome for outcome, _ in halved))]
    detail = f"{best:.1f} by {'; '.join(winners)}"
    yield Figure("ASHA's winner behind the grid's", max(behind), "AP", WINNER_LIMIT, detail=detail)


def prefixes(options: argparse.Namespace, folder: Path) -> Iterator[Figure]:
    """Yield trials that begin alike, which learn once what they have in common, against each for itself."""
    sizes = {"train_rows": options.rows, "test_rows": options.test_rows}
    for at_once in (1, 2):
        spent: dict[bool, tuple[int, float]] = {}
        for share in (True, False):
            log.info("six orders, %d at a time, %s", at_once, "shared" if share else "each for itself")
            own = {"name": f"orders-{at_once}-{share}", "share": share, "concurrency": at_once}
            result = configs.load_tree(str(ORDERS), [])
            base = {
                **result["base"],
                "stream": {**result["base"]["stream"], **sizes},
                "launch": {"cpus_per_worker": 1.0},
            }
            began = time.monotonic()
            outcome = run_sweep(configs.validate(SweepConfig, {**result, **own, "base": base}), str(folder))
            trained = sum(row.tasks - row.forked_tasks for row in outcome.rows)
            spent[share] = trained, time.monotonic() - began
        (learned, seconds), (others, alone) = spent[True], spent[False]
        detail = f"{learned} tasks in {seconds:.0f} s against {others} in {alone:.0f} s"
        yield Figure(f"{at_once} at a time, shared over not", seconds / alone, "x", SHARED_LIMIT, detail=detail)


def _learned(outcome: SweepOutcome) -> int:
    return sum(row.tasks for row in outcome.rows)


def _settings(outcome: SweepOutcome, number: int | None) -> str:
    return "none" if number is None else ", ".join(f"{value:g}" for value in outcome.row(number).settings.values())


def _score(outcome: SweepOutcome, number: int | None) -> float:
    score = None if number is None else outcome.row(number).scores[0]
    return float("-inf") if score is None else score


def _swept(
    name: str, scheduler: str, order: int, options: argparse.Namespace, folder: Path
) -> tuple[SweepOutcome, float]:
    log.info("twenty trials: %s", name)
    result = {
        "name": name,
        "base": tree(options, TASKS),
        "space": {"train.learning_rate": {"grid": list(RATES)}, "method.r": {"grid": list(RANKS)}},
        "search": {"name": "grid", "seed": order},
        "scheduler": {"name": scheduler, "grace": 1, "reduction": options.reduction},
        "concurrency": options.concurrency,
    }
    began = time.monotonic()
    outcome = run_sweep(configs.validate(SweepConfig, result), str(folder))
    return outcome, time.monotonic() - began
