"""Status of a run, from its files alone: activity, progress, nodes, failures, and the command to continue.

Why it exists: `ray job submit` hides a command's exit status, schedulers kill, and the status may be read elsewhere.
What it does not know: Ray, and whether a process is alive; a run is alive as long as its heartbeat is young.
"""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from raycl import config as configs
from raycl.errors import ResumeError, StorageError
from raycl.launch.driver import resume_arguments
from raycl.launch.worker import CONFIG, LOGS, is_log
from raycl.storage import Storage
from raycl.training.control import BEAT_S, HEARTBEAT
from raycl.training.records.journal import RunState, read_state
from raycl.training.records.progress import clock, read_trace
from raycl.training.records.stop_request import stop_of
from raycl.training.records.stop_signal import is_stopped

FRESH_S = 6 * BEAT_S
"""Age of a heartbeat up to which its run is alive: a busy machine beats late, and clocks differ a little."""

RESTART_S = 120.0
"""In which Ray Train starts workers again."""

State = Literal["running", "stopping", "finished", "failed", "stopped", "waiting", "crashed"]

_CHECKPOINT = re.compile(r"phase(\d+)-step(\d+)-")


@dataclass(frozen=True)
class Status:
    """How a run is.

    Attributes:
        state: in one word. message: the same as a sentence.
        details: what else is known, by a short name, in order.
        command: what to type next.
    """

    uri: str
    state: State
    message: str
    details: dict[str, str] = field(default_factory=dict)
    command: str = ""

    def __str__(self) -> str:
        rows = {"run": self.uri, "state": f"{self.state}: {self.message}", **self.details, "next": self.command}
        return "\n".join(f"{name:<9} {text}" for name, text in rows.items() if text)


@dataclass(frozen=True)
class _Files:
    """Contents of the run's files."""

    storage: Storage
    state: RunState
    config: dict[str, Any]
    results: dict[str, Any]
    heartbeat: dict[str, Any]
    error: dict[str, Any]
    stop: dict[str, Any]
    hangs: list[str]
    now: float

    @property
    def attempt(self) -> dict[str, Any]:
        return self.state.attempts[-1] if self.state.attempts else {}

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat."""
        return max(0.0, self.now - float(self.heartbeat.get("time", 0.0)))

    @property
    def phases(self) -> int | None:
        """How many there are in all."""
        found = self.heartbeat.get("phases") or len(self.results.get("phases", ()))
        return int(found) if found else None

    @property
    def is_alive(self) -> bool:
        return self.age < FRESH_S and self.heartbeat.get("activity") not in ("ended", "failed")

    @property
    def is_finished(self) -> bool:
        done = len(self.state.phases)
        return done > 0 and bool(self.results.get("finished")) and done == len(self.results["phases"])


def status_of(folder: str) -> Status:
    """How the run in `folder` (a path or URI) is.

    Raises:
        ResumeError: there is no run. RunError: its journal is damaged. StorageError: it is out of reach.
    """
    storage = Storage.at(folder)
    if not storage.exists(CONFIG):
        raise ResumeError(f"'{folder}' holds no run (no {CONFIG}): give the run directory that an earlier run printed")
    files = _read(storage)
    state, message = _state(files)
    log = _last_line(storage)
    details = {
        "tasks": _tasks(files),
        "step": "" if state in ("running", "finished") else _last_step(files),
        "from": "" if state in ("running", "finished") else _resume_point(files),
        "workers": _workers(files.attempt),
        "attempts": _attempts(files),
        **{f"hang {number}": hang for number, hang in enumerate(files.hangs, 1)},
        "log": f"{log[0]}: {log[1]}" if log else "",
    }
    return Status(storage.uri, state, message, details, _command(files, state))


def _read(storage: Storage) -> _Files:
    state = read_state(storage)
    errors = [_json(storage, f"errors/{name}") for name in storage.list("errors")]
    drivers = {name.removesuffix(".json"): found for name, found in zip(storage.list("errors"), errors, strict=True)}
    driver = state.attempts[-1].get("driver", "") if state.attempts else ""
    since = state.attempts[-1]["started"] if state.attempts else 0.0
    ended = [
        found
        for name, found in drivers.items()
        if found and "-hang-" not in name and (name == driver or found.get("time", 0.0) > since)
    ]
    heartbeat = _json(storage, HEARTBEAT)
    return _Files(
        storage,
        state,
        state.config or configs.from_yaml(storage.read_text(CONFIG), f"{storage.uri}/{CONFIG}"),
        _json(storage, "results.json"),
        heartbeat,
        max(ended, key=lambda found: float(found.get("time", 0.0)), default={}),
        _stop(storage, {driver, str(heartbeat.get("driver", ""))}),
        [str(found["message"]) for name, found in drivers.items() if found and "-hang-" in name],
        time.time(),
    )


def _json(storage: Storage, name: str) -> dict[str, Any]:
    """A file that may be absent, or no JSON: it is not needed to continue."""
    try:
        found = storage.read_json(name) if storage.exists(name) else {}
    except StorageError:
        return {}
    return found if isinstance(found, dict) else {}


def _stop(storage: Storage, drivers: set[str]) -> dict[str, Any]:
    """The newest request to these drivers' workers."""
    found: list[dict[str, Any]] = []
    for driver in drivers - {""}:
        try:
            found += filter(None, [stop_of(storage, driver)])
        except StorageError:
            found.append({"reason": "a request that cannot be read", "time": 0.0})
    return max(found, key=lambda request: float(request["time"]), default={})


def _state(files: _Files) -> tuple[State, str]:
    """In one word, and as a sentence."""
    if files.is_alive:
        activity = f"{_activity(files.heartbeat)}, last progress {_ago(files.age + files.heartbeat['idle_s'])}"
        return (
            ("stopping", f"stop requested by {files.stop['reason']}; {activity}")
            if files.stop
            else ("running", activity)
        )
    done = len(files.state.phases)
    if files.is_finished:
        return "finished", f"all {done} tasks are learned and evaluated"
    if files.error:
        return "failed", str(files.error["message"])
    if files.stop:
        return "stopped", f"by {files.stop['reason']} at {_at(files.stop['time'])} (exit status 75: resume it)"
    if is_stopped(files.storage, done):
        return "stopped", f"by the sweep that it belongs to, after {done} tasks"
    if not files.heartbeat and not files.state.attempts:
        return "waiting", "no worker has started yet: it waits for the cluster, or was ended before"
    return "crashed", _crash(files)


def _crash(files: _Files) -> str:
    last = max(
        float(files.heartbeat.get("time", 0.0)), float(files.attempt.get("ended", files.attempt.get("started", 0)))
    )
    again = "; its workers may be starting again" if files.now - last < RESTART_S else ""
    return (
        f"the last sign of life is from {_at(last)}, {_ago(files.now - last)}: it was killed, lost its nodes or its "
        f"store{again}"
    )


def _activity(heartbeat: dict[str, Any]) -> str:
    """The activity of the workers, as text."""
    activity = heartbeat["activity"]
    if "phase" not in heartbeat:
        return f"{activity}"
    number = f"task {heartbeat['phase'] + 1} of {heartbeat['phases']}"
    if activity == "evaluating":
        return f"evaluating '{heartbeat['task']}' after {number}"
    text = f"{activity} in {number}, '{heartbeat['task']}'"
    if activity == "training" and "steps" in heartbeat:
        loss = f", loss {heartbeat['loss']:.4f}" if "loss" in heartbeat else ""
        text += f", step {heartbeat['step']} of {heartbeat['steps']}{loss}"
    return text


def _tasks(files: _Files) -> str:
    done = [str(record["times"]["phase"]) for record in files.state.phases]
    total = f" of {files.phases}" if files.phases else ""
    return f"{len(done)}{total} done{': ' if done else ''}{', '.join(done)}"


def _last_step(files: _Files) -> str:
    """Of the trace, which is at most `train.log_every_s` older than the run."""
    trace = read_trace(files.storage)
    if not trace:
        return ""
    last, beat = trace[-1], files.heartbeat
    of = f" of {beat['steps']}" if beat.get("phase") == last["phase"] and "steps" in beat else ""
    task = f"task {last['phase'] + 1}, '{last['task']}'"
    return f"the last one recorded is {last['step']}{of} of {task}, loss {last['loss']:.4f}"


def _resume_point(files: _Files) -> str:
    """From where it continues."""
    newest = files.state.checkpoints[-1:]
    found = _CHECKPOINT.match(newest[0]) if newest else None
    return f"it continues after step {int(found[2])} of task {int(found[1]) + 1} ({newest[0]})" if found else ""


def _workers(attempt: dict[str, Any]) -> str:
    by_host: dict[str, list[str]] = {}
    for node in attempt.get("nodes", [attempt] if attempt else []):
        by_host.setdefault(node["host"], []).append(str(node["pid"]))
    nodes = "; ".join(f"{host} (process {', '.join(pids)})" for host, pids in by_host.items())
    return f"{attempt['workers']} on {nodes}" if attempt else ""


def _attempts(files: _Files) -> str:
    if not files.state.attempts:
        return ""
    count = len(files.state.attempts)
    return f"{count}, the {'only' if count == 1 else 'last'} one from {_at(files.attempt['started'])} on"


def _last_line(storage: Storage) -> tuple[str, str] | None:
    """Name of the newest attempt's log, and its last line."""
    for name in reversed([name for name in storage.list(LOGS) if is_log(name)]):
        lines = storage.read(f"{LOGS}/{name}").decode(errors="replace").splitlines()
        if lines:
            return name, lines[-1].strip()
    return None


def _command(files: _Files, state: State) -> str:
    if state in ("running", "stopping"):
        return ""
    if state == "finished":
        return f"raycl report {shlex.quote(files.storage.address)}"
    return f"raycl train {resume_arguments(files.storage, files.config)}"


def _at(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")


def _ago(seconds: float) -> str:
    return f"{clock(seconds)} ago"
