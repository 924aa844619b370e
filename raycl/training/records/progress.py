"""Progress of a run: log lines, and a trace with one record per step."""

import json
import logging
import re
import time
from dataclasses import asdict, dataclass
from typing import Any

from raycl.errors import StorageError
from raycl.progress import report
from raycl.storage import Storage
from raycl.types import Phase

log: logging.Logger = logging.getLogger("raycl")
FOLDER = "trace"
_TRACE = re.compile(r"attempt-\d{4,}\.jsonl")


@dataclass(frozen=True)
class StepResult:
    """The result of a step, summed over all workers.

    Attributes:
        loss: mean task loss per loss position, before the update, penalties left out.
        grad_norm: norm of the whole gradient, after modifiers and before clipping.
        learning_rate: the rate that was used.
        tokens: source and target tokens read.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int


class Trace:
    """Per-step records of one attempt, `trace/attempt-0001.jsonl`; whole file on storage at every flush."""

    def __init__(self, storage: Storage, attempt: int) -> None:
        self.storage = storage
        self.name: str = f"{FOLDER}/attempt-{attempt:04d}.jsonl"
        self._lines: list[str] = []

    def add(self, phase: Phase, step: int, result: StepResult, seconds: float) -> None:
        place = {"phase": phase.index, "task": phase.name, "step": step}
        record = {**place, **asdict(result), "seconds": round(seconds, 4)}
        self._lines.append(json.dumps(record))

    def flush(self) -> None:
        """Write everything so far."""
        self.storage.write(self.name, ("\n".join(self._lines) + "\n").encode())


class TraceReader:
    """Reads the steps of a run, again and again while it runs: each time only the lines that are new."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._read: dict[str, int] = {}
        self._lines: dict[str, int] = {}
        self._merged: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {}

    def steps(self) -> list[dict[str, Any]]:
        """Return all steps so far in order; where attempts overlap, the record of the later one counts.

        Raises:
            StorageError: out of reach, or a line is not JSON.
        """
        for file, info in sorted(self.storage.files(FOLDER).items()):
            name = file.rpartition("/")[2]
            if _TRACE.fullmatch(name) and info.size != self._read.get(name):
                self._add_new(name)
        return [self._merged[key][1] for key in sorted(self._merged)]

    def _add_new(self, name: str) -> None:
        """Add the lines behind those that are known: the writer only ever adds lines to a file."""
        data = self.storage.read_from(f"{FOLDER}/{name}", self._read.get(name, 0))
        new = data[: data.rfind(b"\n") + 1]  # HDFS may show a part of a line
        before, lines = self._lines.get(name, 0), new.splitlines()
        for number, line in enumerate(lines, before + 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                where = f"'{self.storage.uri}/{FOLDER}/{name}' line {number}"
                raise StorageError(f"{where} is not JSON: {error}") from error
            key = (record["phase"], record["step"])
            if key not in self._merged or self._merged[key][0] <= name:
                self._merged[key] = (name, record)
        self._lines[name] = before + len(lines)
        self._read[name] = self._read.get(name, 0) + len(new)


def read_trace(storage: Storage) -> list[dict[str, Any]]:
    """Return the steps of a run (`TraceReader.steps`)."""
    return TraceReader(storage).steps()


class Progress:
    """One line every few seconds: task, step, loss, tokens per second, time left."""

    def __init__(self, every_s: float, phases: int) -> None:
        self.every_s = every_s
        self.phases = phases
        self._logged = time.monotonic()
        self._tokens = 0
        self._seconds = 0.0
        self._steps = 0
        self._later = 0
        self._prepared_s = 0.0

    def begin(self, phase: Phase, rows: int, steps: int, start: int, later: int, prepared_s: float = 0.0) -> None:
        """Begin a phase, or resume it after `start` steps; `later` steps follow in later phases.

        Args:
            prepared_s: seconds that the phase took before its first step, as each later one will: keys are learned.
        """
        self._later, self._prepared_s = later, prepared_s
        again = f", continuing after step {start}" if start else ""
        log.info("[%d/%d] %s: %d rows, %d steps%s", phase.index + 1, self.phases, phase.name, rows, steps, again)
        self._logged, self._tokens, self._seconds, self._steps = time.monotonic(), 0, 0.0, 0

    def step(self, phase: Phase, step: int, steps: int, result: StepResult, seconds: float) -> bool:
        """Count a step; logs a line and returns True if `every_s` seconds have passed or the phase is over."""
        self._tokens += result.tokens
        self._seconds += seconds
        self._steps += 1
        report(steps_of(phase.index + 1, self.phases, phase.name), step, steps, has_lines=True)
        if time.monotonic() - self._logged < self.every_s and step < steps:
            return False
        self._logged = time.monotonic()
        rate = self._tokens / max(self._seconds, 1e-9)
        pace = self._seconds / self._steps
        log.info(
            "[%d/%d] %s  step %d/%d  loss %.4f  %s tokens/s  training left: %s in this task, %s in all",
            phase.index + 1,
            self.phases,
            phase.name,
            step,
            steps,
            result.loss,
            f"{rate:,.0f}",
            clock((steps - step) * pace),
            clock((steps - step + self._later) * pace + (self.phases - phase.index - 1) * self._prepared_s),
        )
        return True


def steps_of(phase: int, phases: int, task: str) -> str:
    """Return what the bar of a task's steps is called."""
    return f"[{phase}/{phases}] {task}, steps"


def clock(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
