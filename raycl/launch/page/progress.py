"""The state and progress of a run as one JSON tree: `GET /status.json` of the page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raycl.launch.status import RunFiles, nodes_of, status_from
from raycl.metrics.matrix import AccuracyMatrix
from raycl.metrics.run_results import INSTRUCTION, METRICS, backbone_of, method_of, title_of
from raycl.training.records.progress import TraceReader
from raycl.training.records.results import metrics_so_far, other_row

POINTS = 500
"""The most points of the loss curve, plus the last one of each task."""

LOG_LINES = 14

Step = Mapping[str, Any]
"""A record of the trace."""


def progress_of(files: RunFiles, trace: TraceReader) -> dict[str, Any]:
    """Return what is known of the run that wrote these files and this trace.

    Keys: `run`, `title`, `state`, `message`, `command`, `details` (as the text of `raycl status`), `tasks` (each with
    `state` done, current or waiting), `loss`, `matrix`, `left` (seconds, None where nothing runs), `nodes`, `workers`,
    `attempts`, `hangs`, `log`, `time`.
    """
    status, steps = status_from(files, trace), trace.steps()
    phases = _phases(files, steps)
    tasks = _tasks(files, phases, steps)
    name, lines = files.log
    return {
        "run": files.storage.address,
        "title": _title(files),
        "state": status.state,
        "message": status.message,
        "command": status.command,
        "details": status.details,
        "tasks": tasks,
        "loss": _loss(tasks, steps),
        "matrix": _matrix(files, phases),
        "left": _left(files, tasks, steps) if files.is_alive else None,
        "nodes": [{"host": host, "processes": pids} for host, pids in nodes_of(files.attempt).items()],
        "workers": files.attempt.get("workers"),
        "attempts": [{"started": attempt["started"], "host": attempt["host"]} for attempt in files.state.attempts],
        "hangs": files.hangs,
        "log": {"name": name, "lines": lines[-LOG_LINES:]},
        "time": files.now,
    }


def _title(files: RunFiles) -> str:
    """Return the run in one line; a waiting run may have no name of its stream yet."""
    named = {"name": files.attempt["stream"]} if "stream" in files.attempt else files.results.get("stream")
    tree = {"config": files.config, "stream": named}
    return title_of(tree) if named else f"{method_of(tree)}, {backbone_of(tree)}"


def _phases(files: RunFiles, steps: Sequence[Step]) -> list[str]:
    """Return names of what is trained one after another, of which older runs record only what has begun."""
    if names := files.attempt.get("phases") or files.results.get("phases"):
        return list(map(str, names))
    begun = {int(step["phase"]): str(step["task"]) for step in steps}
    done = {record["phase"]: str(record["times"]["phase"]) for record in files.state.phases}
    apart = {number: str(beat["name"]) for number, beat in files.apart.items()}
    named = begun | done | apart
    return [named.get(number, f"task {number + 1}") for number in range(max(files.phases or 0, len(named)))]


# ---- tasks -------------------------------------------------------------------------------------------------------


def _tasks(files: RunFiles, phases: Sequence[str], steps: Sequence[Step]) -> list[dict[str, Any]]:
    last = {int(step["phase"]): step for step in steps}
    planned = next(iter(files.apart.values()), files.heartbeat).get("steps_by_phase") or []
    planned = planned if len(planned) == len(phases) else [None] * len(phases)
    done = [_done(record, last.get(number)) for number, record in enumerate(files.state.phases)]
    finished = done[: len(phases)]
    for number in range(len(finished), len(phases)):
        begun = number in files.apart or (number == len(done) and (number in last or _works_on(files, number)))
        step, total = (_step(files, number, last.get(number)) if begun else 0), planned[number]
        beat = _beat_of(files, number)
        if begun and _works_on(files, number):
            total = beat.get("steps", total)
        entry = {"state": "current" if begun else "waiting", "step": step, "steps": total, "loss": None}
        if begun:
            entry["loss"] = _finite(last[number]["loss"]) if number in last else None
            entry["activity"] = beat.get("activity") if _works_on(files, number) and files.is_alive else None
        finished.append(entry)
    return [{"name": name, **entry} for name, entry in zip(phases, finished, strict=True)]


def _done(record: Mapping[str, Any], last: Step | None) -> dict[str, Any]:
    times = record["times"]
    return {
        "state": "done",
        "step": times["steps"],
        "steps": times["steps"],
        "loss": _finite(last["loss"]) if last else None,
        "train_s": times["train_s"],
        "eval_s": times["eval_s"],
    }


def _beat_of(files: RunFiles, phase: int) -> dict[str, Any]:
    """Return the heartbeat of a phase's own worker group, or else that of the run."""
    return files.apart.get(phase, files.heartbeat)


def _works_on(files: RunFiles, phase: int) -> bool:
    return bool(_beat_of(files, phase).get("phase") == phase)


def _step(files: RunFiles, phase: int, last: Step | None) -> int:
    """Return steps that are done: the trace is written after the heartbeat, whose step may be the former phase's."""
    recorded, beat = int(last["step"]) if last else 0, _beat_of(files, phase)
    if phase in files.apart:
        return int(beat.get("step", 0))
    trains = _works_on(files, phase) and beat.get("activity") == "training" and files.is_alive
    return max(recorded, int(beat.get("step", 0))) if trains else recorded


# ---- loss --------------------------------------------------------------------------------------------------------


def _loss(tasks: Sequence[Mapping[str, Any]], steps: Sequence[Step]) -> dict[str, Any]:
    """Return points `[step of the whole run, loss]`, how many steps the run has, and where each task begins."""
    last = {int(step["phase"]): int(step["step"]) for step in steps}
    starts, total = [], 0
    for number, task in enumerate(tasks):
        starts.append(total)
        total += max(task["steps"] or 0, last.get(number, 0))
    every = max(1, math.ceil(len(steps) / POINTS))
    points = [
        [starts[step["phase"]] + step["step"], _finite(step["loss"])]
        for number, step in enumerate(steps)
        if step["phase"] < len(starts) and (number % every == 0 or step["step"] == last[step["phase"]])
    ]
    return {"points": points, "recorded": len(steps), "steps": total, "starts": starts}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- matrix ------------------------------------------------------------------------------------------------------


def _matrix(files: RunFiles, phases: Sequence[str]) -> dict[str, Any]:
    """Return rows of phases and the other last row by tasks, None where nothing is measured yet; metrics so far."""
    stream = files.results.get("stream") or {}
    tasks = files.attempt.get("tasks") or stream.get("tasks") or phases
    done = len(files.state.phases)
    if not tasks or len(files.state.phases) > len(phases):
        return {"tasks": [], "rows": [], "values": [], "metrics": {}}
    matrix = AccuracyMatrix.of_records(tasks, phases, files.state.phases)
    numbers = metrics_so_far(matrix, done, files.results.get("singles")) if done else {}
    metrics = {title: numbers[name] for name, title in METRICS.items() if name in numbers}
    rows, values = [f"after {phase}" for phase in phases], matrix.values()
    if other := other_row(files.config, files.state):
        rows.append(INSTRUCTION[other["instruction"]])
        values.append([cell and cell["value"] for cell in map(other["cells"].get, tasks)])
    return {"tasks": list(tasks), "rows": rows, "values": values, "metrics": metrics}


# ---- time left ---------------------------------------------------------------------------------------------------


def _left(files: RunFiles, tasks: Sequence[Mapping[str, Any]], steps: Sequence[Step]) -> dict[str, Any] | None:
    """Return seconds of training and evaluation to come, at the pace so far; None before the first step.

    The pace of training is that of the task's own steps, that of evaluation the mean over the evaluations so far:
    None before the first. What methods do between tasks is not counted.
    """
    current = next((number for number, task in enumerate(tasks) if task["state"] != "done"), None)
    if current is None or not steps or any(task["steps"] is None for task in tasks):
        return None
    seconds = [step["seconds"] for step in steps if step["phase"] == current] or [step["seconds"] for step in steps]
    pace = sum(seconds) / len(seconds)
    training = pace * sum(task["steps"] - task["step"] for task in tasks[current:])
    rows = [_cells(files, number, len(tasks)) for number in range(len(tasks))]
    spent = [record["times"]["eval_s"] for record in files.state.phases]
    evaluation = sum(spent) / sum(rows[: len(spent)]) * sum(rows[len(spent) :]) if spent else None
    since = files.idle_s
    if files.heartbeat.get("activity") == "evaluating" and evaluation is not None:
        evaluation = max(0.0, evaluation - since)
    else:
        training = max(0.0, training - since)
    return {"training_s": training, "evaluation_s": evaluation}


def _cells(files: RunFiles, phase: int, phases: int) -> int:
    if files.config["stream"].get("schedule") == "separate":
        return 1
    tasks = len(files.attempt.get("tasks") or range(phases))
    return tasks if files.config["eval"].get("tasks") == "all" or phases < tasks else phase + 1
