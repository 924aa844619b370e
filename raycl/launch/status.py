"""Status of a run, from its files alone: activity, progress, nodes, failures, and the command to continue.

`ray job submit` hides a command's exit status, schedulers kill, and the status may be read elsewhere. Does not depend
on Ray, and cannot tell whether a process is alive: a run counts as alive while its heartbeat is young. The text of
`raycl status` and its page share one reading of a run's files.
"""

import re
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from raycl import config as configs
from raycl.errors import StorageError
from raycl.launch.console import LOGS, is_log
from raycl.storage import Storage
from raycl.storage.records import without_hash
from raycl.training.definition.job import TASKS
from raycl.training.records.journal import JournalReader, RunState
from raycl.training.records.progress import TraceReader, clock
from raycl.training.records.run_folder import CONFIG, is_stopped, resume_arguments, run_at
from raycl.training.workers.control import BEAT_S, HEARTBEAT
from raycl.training.workers.stopping import StopRequest, stop_of, stopped_by

RESTART_S = 120.0
"""Seconds in which Ray Train restarts workers."""

State = Literal["running", "stopping", "finished", "failed", "stopped", "waiting", "crashed"]

_CHECKPOINT = re.compile(r"phase(\d+)-step(\d+)-")


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


@dataclass(frozen=True)
class Status:
    """The status of a run.

    Attributes:
        state: one word. message: the same as a sentence.
        details: further facts by short names, in order.
        command: the next command to type.
    """

    uri: str
    state: State
    message: str
    details: dict[str, str] = field(default_factory=dict)
    command: str = ""

    def __str__(self) -> str:
        rows = {"run": self.uri, "state": f"{self.state}: {self.message}", **self.details, "next": self.command}
        return "\n".join(f"{name:<9} {text}" for name, text in rows.items() if text)


def status_of(folder: str) -> Status:
    """Return how the run in `folder` (a path or URI) is.

    Raises:
        ResumeError: there is no run. RunError: its journal is damaged. StorageError: it is out of reach.
    """
    files = read_run(Storage.at(folder))
    return status_from(files, TraceReader(files.storage))


def status_from(files: RunFiles, trace: TraceReader) -> Status:
    """Return how the run is that wrote these files and this trace."""
    state, message = _state(files)
    log, lines = files.log
    details = {
        "tasks": _tasks(files),
        "step": "" if state in ("running", "finished") else _last_step(files, trace),
        "from": "" if state in ("running", "finished") else _resume_point(files),
        "workers": _workers(files.attempt),
        "attempts": _attempts(files),
        **{f"hang {number}": hang for number, hang in enumerate(files.hangs, 1)},
        "log": f"{log}: {lines[-1].strip()}" if lines else "",
    }
    return Status(files.storage.uri, state, message, details, _command(files, state))


def _state(files: RunFiles) -> tuple[State, str]:
    if files.is_alive:
        activity = f"{'; '.join(map(_activity, files.beats))}, last progress {_ago(files.idle_s)}"
        return (
            ("stopping", f"stop requested by {files.stop.reason}; {activity}") if files.stop else ("running", activity)
        )
    done = len(files.state.phases)
    if files.is_finished:
        return "finished", f"all {done} tasks are learned and evaluated"
    if files.error:
        return "failed", str(files.error["message"])
    if files.stop:
        status = stopped_by(files.stop.reason, "").exit_status
        return "stopped", f"by {files.stop.reason} at {_at(files.stop.time)} (exit status {status}: resume it)"
    if is_stopped(files.storage, done):
        return "stopped", f"by the sweep that it belongs to, after {done} tasks"
    if not files.heartbeat and not files.state.attempts and not files.apart:
        return "waiting", "no worker has started yet: it waits for the cluster, or was ended before"
    return "crashed", _crash(files)


def _crash(files: RunFiles) -> str:
    last = max(
        *(float(beat.get("time", 0.0)) for beat in (files.heartbeat, *files.apart.values())),
        float(files.attempt.get("ended", files.attempt.get("started", 0))),
    )
    again = "; its workers may be starting again" if files.now - last < RESTART_S else ""
    return (
        f"the last sign of life is from {_at(last)}, {_ago(files.now - last)}: it was killed, lost its nodes or its "
        f"store{again}"
    )


def _activity(heartbeat: dict[str, Any]) -> str:
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


def _tasks(files: RunFiles) -> str:
    done = [str(record["times"]["phase"]) for record in files.state.phases]
    total = f" of {files.phases}" if files.phases else ""
    apart = "; learned and not joined yet: " + ", ".join(files.learned_apart) if files.learned_apart else ""
    return f"{len(done)}{total} done{': ' if done else ''}{', '.join(done)}{apart}"


def _last_step(files: RunFiles, trace: TraceReader) -> str:
    """Return the last step of the trace, which is at most `train.log_every_s` older than the run."""
    steps = trace.steps()
    if not steps:
        return ""
    last, beat = steps[-1], files.heartbeat
    of = f" of {beat['steps']}" if beat.get("phase") == last["phase"] and "steps" in beat else ""
    task = f"task {last['phase'] + 1}, '{last['task']}'"
    return f"the last one recorded is {last['step']}{of} of {task}, loss {last['loss']:.4f}"


def _resume_point(files: RunFiles) -> str:
    newest = files.state.checkpoints[-1:]
    match = _CHECKPOINT.match(newest[0]) if newest else None
    return f"it continues after step {int(match[2])} of task {int(match[1]) + 1} ({newest[0]})" if match else ""


def nodes_of(attempt: dict[str, Any]) -> dict[str, list[int]]:
    """Return host -> processes of an attempt's workers there."""
    by_host: dict[str, list[int]] = {}
    for node in attempt.get("nodes", [attempt] if attempt else []):
        by_host.setdefault(node["host"], []).append(node["pid"])
    return by_host


def _workers(attempt: dict[str, Any]) -> str:
    nodes = "; ".join(f"{host} (process {', '.join(map(str, pids))})" for host, pids in nodes_of(attempt).items())
    return f"{attempt['workers']} on {nodes}" if attempt else ""


def _attempts(files: RunFiles) -> str:
    if not files.state.attempts:
        return ""
    count = len(files.state.attempts)
    return f"{count}, the {'only' if count == 1 else 'last'} one from {_at(files.attempt['started'])} on"


def _command(files: RunFiles, state: State) -> str:
    if state in ("running", "stopping"):
        return ""
    if state == "finished":
        return f"raycl report {shlex.quote(files.storage.address)}"
    return f"raycl train {resume_arguments(files.storage, files.config)}"


def _at(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")


def _ago(seconds: float) -> str:
    return f"{clock(max(0.0, seconds))} ago"
