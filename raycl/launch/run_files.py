"""The files that a run writes: journal, heartbeat, results, errors, requests to stop, log.

The text of `raycl status` and its page share one reading of a run's files.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raycl import config as configs
from raycl.errors import StorageError
from raycl.launch.console import LOGS, is_log
from raycl.storage import Storage
from raycl.storage.records import without_hash
from raycl.training.definition.job import TASKS
from raycl.training.records.journal import JournalReader, RunState
from raycl.training.records.run_folder import CONFIG, run_at
from raycl.training.workers.control import BEAT_S, HEARTBEAT
from raycl.training.workers.stopping import StopRequest, stop_of

FRESH_S = 6 * BEAT_S
"""Age of a heartbeat up to which its run is alive: a busy machine beats late, and clocks differ a little."""


@dataclass(frozen=True)
class RunFiles:
    """Contents of the run's files.

    Attributes:
        error: the error of ours that ended the newest attempt, if any. stop: the newest request to stop it.
        hangs: messages of workers that made no progress.
        log: name of the newest attempt's log, and its lines; both empty before there are any.
        now: when they were read.
        apart: index of a phase -> heartbeat of the worker group of its task, where tasks are learned at the same time
            and the run has not joined this one yet; with its `name`.
    """

    storage: Storage
    state: RunState
    config: dict[str, Any]
    results: dict[str, Any]
    heartbeat: dict[str, Any]
    error: dict[str, Any]
    stop: StopRequest | None
    hangs: list[str]
    log: tuple[str, list[str]]
    now: float
    apart: dict[int, dict[str, Any]]

    @property
    def attempt(self) -> dict[str, Any]:
        return self.state.attempts[-1] if self.state.attempts else {}

    @property
    def beats(self) -> list[dict[str, Any]]:
        """The heartbeats of the workers that are alive: the run's own, or those of its tasks."""
        return [beat for beat in (self.heartbeat, *self.apart.values()) if _is_alive(beat, self.now)]

    @property
    def learned_apart(self) -> list[str]:
        """Names of tasks that are learned and that the run has not joined yet."""
        return [str(beat["name"]) for beat in self.apart.values() if beat.get("learned")]

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress of workers that are alive."""
        return min(_age(beat, self.now) + float(beat["idle_s"]) for beat in self.beats)

    @property
    def phases(self) -> int | None:
        """The total number of phases."""
        known = (beat["phases"] for beat in (*self.apart.values(), self.heartbeat) if beat.get("phases"))
        count = next(known, None) or len(self.results.get("phases", ()))
        return int(count) if count else None

    @property
    def is_alive(self) -> bool:
        return bool(self.beats)

    @property
    def is_finished(self) -> bool:
        done = len(self.state.phases)
        return done > 0 and bool(self.results.get("finished")) and done == len(self.results["phases"])


def read_run(storage: Storage, journal: JournalReader | None = None) -> RunFiles:
    """Return the run in a folder.

    Args:
        journal: reads the journal of that folder, and has perhaps done so before.

    Raises:
        ResumeError: there is no run. RunError: its journal is damaged. StorageError: it is out of reach.
    """
    run_at(storage.address)
    state = (journal or JournalReader(storage)).state()
    drivers = {name.removesuffix(".json"): _json(storage, f"errors/{name}") for name in storage.list("errors")}
    driver = state.attempts[-1].get("driver", "") if state.attempts else ""
    since = state.attempts[-1]["started"] if state.attempts else 0.0
    ended = [
        error
        for name, error in drivers.items()
        if error and "-" not in name and (name == driver or error.get("time", 0.0) > since)
    ]
    heartbeat, apart = _json(storage, HEARTBEAT), _apart(storage, len(state.phases))
    return RunFiles(
        storage,
        state,
        state.config or configs.from_yaml(storage.read_text(CONFIG), f"{storage.uri}/{CONFIG}"),
        _results(storage),
        heartbeat,
        max(ended, key=lambda error: float(error.get("time", 0.0)), default={}),
        _stop(storage, {driver, str(heartbeat.get("driver", ""))}) or _stop_apart(storage, apart),
        [str(error["message"]) for name, error in drivers.items() if error and "-hang-" in name],
        _log(storage),
        time.time(),
        {_phase_of(folder): {**beat, "name": folder.partition("-")[2]} for folder, beat in apart.items()},
    )


def _age(heartbeat: dict[str, Any], now: float) -> float:
    return max(0.0, now - float(heartbeat.get("time", 0.0)))


def _is_alive(heartbeat: dict[str, Any], now: float) -> bool:
    return _age(heartbeat, now) < FRESH_S and heartbeat.get("activity") not in ("ended", "failed")


def _apart(storage: Storage, joined: int) -> dict[str, dict[str, Any]]:
    """Return the folder of each task that the run has not joined -> the heartbeat of its worker group."""
    beats = {f"{TASKS}/{name}": _json(storage, f"{TASKS}/{name}/{HEARTBEAT}") for name in storage.list(TASKS)}
    return {folder: beat for folder, beat in beats.items() if beat and _phase_of(folder) >= joined}


def _phase_of(folder: str) -> int:
    """Return the index of a task's phase; the first heartbeat of its worker group does not know it yet."""
    return int(folder.rpartition("/")[2].partition("-")[0])


def _stop_apart(storage: Storage, apart: dict[str, dict[str, Any]]) -> StopRequest | None:
    alive = {folder: beat for folder, beat in apart.items() if _is_alive(beat, time.time())}
    beats = alive or apart  # a task that has not begun again may have an earlier request
    stops = [_stop(storage.sub(folder), {str(beat.get("driver", ""))}) for folder, beat in beats.items()]
    return max(filter(None, stops), key=lambda stop: stop.time, default=None)


def _results(storage: Storage) -> dict[str, Any]:
    with suppress(StorageError):
        return without_hash(_json(storage, "results.json"), "results.json")
    return {}


def _json(storage: Storage, name: str) -> dict[str, Any]:
    """Return a file that may be absent, or no JSON: it is not needed to continue."""
    try:
        tree = storage.read_json(name) if storage.exists(name) else {}
    except StorageError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _stop(storage: Storage, drivers: set[str]) -> StopRequest | None:
    requests: list[StopRequest] = []
    for driver in drivers - {""}:
        try:
            requests += filter(None, [stop_of(storage, driver)])
        except StorageError:
            requests.append(StopRequest("a request that cannot be read", 0.0, ""))
    return max(requests, key=lambda request: request.time, default=None)


def _log(storage: Storage) -> tuple[str, list[str]]:
    for name in reversed([name for name in storage.list(LOGS) if is_log(name)]):
        lines = storage.read(f"{LOGS}/{name}").decode(errors="replace").splitlines()
        if lines:
            return name, lines
    return "", []
