"""Trials that begin alike learn what they have in common once, however many run at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycl import config as configs
from raycl.operations.sweep.definition.sweep_config import SweepConfig, load_sweep
from raycl.operations.sweep.definition.sweep_folder import SweepFolder
from raycl.operations.sweep.search.searchers import Planned
from raycl.operations.sweep.trials.prefix import prefix_keys, shared_keys
from raycl.training.records.fork_points import FORK_POINT

REPO = Path(__file__).resolve().parents[4]


class Simulation:
    """A sweep whose trials take one unit of time for each task that they learn.

    Attributes:
        learned: tasks learned so far, by all trials. time: units of time.
    """

    def __init__(self, folder: SweepFolder, searcher: Planned, keys: dict[int, list[str]], tasks: int) -> None:
        self.folder, self.searcher, self.keys, self.tasks = folder, searcher, keys, tasks
        self.learned = self.time = 0
        self.running: dict[str, tuple[int, int]] = {}
        self.order: list[int] = []

    def start(self, slots: int) -> None:
        while len(self.running) < slots:
            name = f"id{len(self.order)}"
            proposed = self.searcher.suggest(name)
            if not isinstance(proposed, dict):
                assert self.running or proposed == "FINISHED", "nothing runs, and nothing starts"
                return
            number = proposed["number"]
            self.order.append(number)
            known = [done for done, key in enumerate(self.keys[number], 1) if self.saved(key)]
            self.running[name] = number, max(known, default=0)

    def saved(self, key: str) -> bool:
        return self.folder.prefix(key).exists(FORK_POINT)

    def step(self, dies: frozenset[int] = frozenset()) -> None:
        """One unit of time, in which each running trial learns a task."""
        self.time += 1
        for name, (number, done) in list(self.running.items()):
            if number in dies:
                del self.running[name]
                self.searcher.on_trial_complete(name, error=True)
                continue
            self.learned += 1
            done += 1
            self.running[name] = number, done
            key = self.keys[number][done - 1] if done <= len(self.keys[number]) else ""
            if key in shared_keys(list(self.keys.values())) and not self.saved(key):
                self.folder.prefix(key).write(FORK_POINT, b"{}")
            if done == self.tasks:
                del self.running[name]
                self.searcher.on_trial_complete(name, {})

    def run(self, slots: int) -> tuple[int, int]:
        self.start(slots)
        while self.running:
            self.step()
            self.start(slots)
        return self.learned, self.time


def simulation(sweep: SweepConfig, folder: Path, waits: bool = True) -> Simulation:
    place, trials = SweepFolder.of(sweep, str(folder)), dict(enumerate(sweep.trials()))
    planned = {number: place.config(sweep, number, settings) for number, settings in trials.items()}
    keys = {number: prefix_keys(run, [str(task) for task in run.stream.tasks or ()]) for number, run in planned.items()}
    shared = shared_keys(list(keys.values()))
    prefixes = {number: [key for key in own if key in shared] for number, own in keys.items()}
    return Simulation(place, Planned(sweep, place, trials, prefixes if waits else None), keys, 5)


@pytest.mark.parametrize(("slots", "expected", "without"), [(1, (46, 46), 46), (2, (46, 25), 49), (16, (46, 5), 60)])
def test_the_orders_that_come_with_raycl_are_learned_with_as_few_tasks_at_any_concurrency(
    tmp_path: Path, slots: int, expected: tuple[int, int], without: int
) -> None:
    """Six orders of two methods, 60 tasks; without waiting, more slots share less."""
    sweep = load_sweep(str(REPO / "sweeps/task_orders.yaml"))
    assert simulation(sweep, tmp_path / "waits").run(slots) == expected
    assert simulation(sweep, tmp_path / "alone", waits=False).run(slots)[0] == without


def three(**changes: Any) -> SweepConfig:
    orders = [
        ["a", "b", "c", "d", "e"],
        ["a", "b", "c", "e", "d"],
        ["a", "b", "d", "c", "e"],
        ["b", "a", "c", "d", "e"],
    ]
    tree = {"name": "s", "space": {"stream.tasks": {"grid": orders}}, "search": "grid", **changes}
    return configs.validate(SweepConfig, tree)


def test_others_go_ahead_while_one_trial_learns_what_is_common(tmp_path: Path) -> None:
    swept = simulation(three(), tmp_path)
    swept.start(4)
    assert swept.order == [0, 3], "the first of three that begin alike, and the one that does not"
    swept.step()
    swept.start(4)
    assert swept.order == [0, 3], "b is common too"
    swept.step()
    swept.start(4)
    assert swept.order == [0, 3, 2], "the next one still waits for c"
    swept.step()
    swept.start(4)
    assert swept.order == [0, 3, 2, 1]


def test_a_prefix_whose_trial_ends_without_it_is_taken_up_by_the_next(tmp_path: Path) -> None:
    swept = simulation(three(), tmp_path)
    swept.start(4)
    swept.step(dies=frozenset({0}))
    swept.start(4)
    assert swept.order == [0, 3, 1], "and the third waits for that one now"
    swept.run(4)
    assert sorted(swept.order) == [0, 1, 2, 3]
