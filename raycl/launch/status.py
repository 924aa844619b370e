"""Status of a run, from its files alone: activity, progress, nodes, failures, and the command to continue.

`ray job submit` hides a command's exit status, schedulers kill, and the status may be read elsewhere. Does not depend
on Ray, and cannot tell whether a process is alive: a run counts as alive while its heartbeat is young.
"""

import re
import shlex
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from raycl.launch.run_files import RunFiles, read_run
from raycl.storage import Storage
from raycl.training.records.progress import TraceReader, clock
from raycl.training.records.run_folder import is_stopped, resume_arguments

RESTART_S = 120.0
"""Seconds in which Ray Train restarts workers."""

State = Literal["running", "stopping", "finished", "failed", "stopped", "waiting", "crashed"]

_CHECKPOINT = re.compile(r"phase(\d+)-step(\d+)-")


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
        return "stopped", f"by {files.stop.reason} at {_at(files.stop.time)} (exit status 75: resume it)"
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
