"""The folder of a sweep: what lies where, and what became of each trial, read from files alone.

    sweep.yaml              the sweep as it was started
    settings/0003.json      what trial 3 was given, before it starts
    repeated/0004.json      what a guided search proposed as trial 4, which equals an earlier trial and is not run
    trials/NAME-0003/       its run, like any other
    failed/0003.json        why its last try failed
    stop/DRIVER.json        request of that driver that all trials write a checkpoint and end
    prefixes/KEY/           the first phases that several trials have in common
    bank/                   adapters and snapshots of all trials, each on branch sweeps/NAME/0003
    best.yaml, summary.*    what it found

A sweep continues from what is here, never from Ray's own records, which are pickles of one version.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from raycl.config import Tree
from raycl.errors import DamagedError, RunError
from raycl.operations.sweep.definition.sweep_config import Settings, SweepConfig, plain
from raycl.storage import Storage
from raycl.storage.records import without_hash
from raycl.training.records.journal import RunState, read_state
from raycl.training.records.run_folder import is_stopped
from raycl.training.setup.run_config import RunConfig, from_tree

SWEEP, SETTINGS, REPEATED, FAILED = "sweep.yaml", "settings", "repeated", "failed"

State = Literal["done", "stopped", "failed", "unfinished"]
"""`stopped`: by the scheduler."""


@dataclass(frozen=True)
class SweepFolder:
    """A sweep's folder."""

    storage: Storage
    name: str

    @staticmethod
    def of(sweep: SweepConfig, directory: str) -> SweepFolder:
        """Return the folder of a sweep; nothing is created."""
        return SweepFolder(Storage.at(directory).sub(sweep.name), sweep.name)

    def run_name(self, number: int) -> str:
        """Return the folder of a trial, and its name for trackers."""
        return f"{self.name}-{number:04d}"

    def run(self, number: int) -> Storage:
        return self.storage.sub(f"trials/{self.run_name(number)}")

    def prefix(self, key: str) -> Storage:
        """Return the folder in which the phases with this key are kept for other trials."""
        return self.storage.sub(f"prefixes/{key}")

    def config(self, sweep: SweepConfig, number: int, settings: Settings) -> RunConfig:
        """Return a trial's run, with a place of its own.

        Raises:
            ConfigError: the settings make no valid config.
        """
        tree = plain(sweep.tree(settings))
        tree["output"] = {"dir": self.storage.sub("trials").address, "name": self.run_name(number), "exists": "resume"}
        own = {
            "branch": f"sweeps/{self.name}/{number:04d}"
        }  # so no endpoint that follows another branch answers from it
        given = tree.get("bank", {})
        where = {} if given.get("start") else {"dir": self.storage.sub("bank").address}
        tree["bank"] = {**where, **given, **own}
        group = {} if "WANDB_RUN_GROUP" in os.environ else {"group": sweep.name}
        tree["tracking"] = {**group, **tree.get("tracking", {})}
        return from_tree(tree)

    def write_settings(self, number: int, settings: Settings, repeated: bool = False) -> None:
        """Write down what a trial is given, or a proposal that is not run, with what acts on nothing in it."""
        self.storage.write_json(f"{REPEATED if repeated else SETTINGS}/{number:04d}.json", settings)

    def settings(self, repeated: bool = False) -> dict[int, Settings]:
        """Return what each trial so far was given, by number; or the proposals so far that were not run."""
        folder = REPEATED if repeated else SETTINGS
        names = [name for name in self.storage.list(folder) if re.fullmatch(r"\d{4,}\.json", name)]
        return {int(name.removesuffix(".json")): dict(self.storage.read_json(f"{folder}/{name}")) for name in names}

    def write_failure(self, number: int, error: str) -> None:
        """Write down why a trial failed."""
        self.storage.write_json(f"{FAILED}/{number:04d}.json", {"error": error})

    def error(self, number: int) -> str | None:
        """Return why a trial failed; None: it did not."""
        file = f"{FAILED}/{number:04d}.json"
        return str(self.storage.read_json(file)["error"]) if self.storage.exists(file) else None

    def state(self, number: int, phases: int) -> tuple[State, RunState]:
        """Return what became of a trial of so many phases, and how far it got.

        One that was ended between its last phase and its results is unfinished: they are written when it continues.
        """
        run = self.run(number)
        reached = read_state(run)
        done = len(reached.phases)
        if done == phases:
            results = self.results(number)
            return ("unfinished" if results is None or not results["finished"] else "done"), reached
        if is_stopped(run, done):
            return "stopped", reached
        return ("failed" if self.error(number) is not None else "unfinished"), reached

    def results(self, number: int) -> Tree | None:
        """Return the result tree of a trial's run, if it has one."""
        run = self.run(number)
        if not run.exists("results.json"):
            return None
        try:
            return without_hash(run.read_json("results.json"), f"{run.uri}/results.json")
        except DamagedError as error:
            raise RunError(f"{error}: restore a copy, or remove it and run the sweep again") from error
