"""Lines for people and records for machines."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from raycl.errors import StorageError
from raycl.storage import Storage
from raycl.training.records.progress import Progress, StepResult, Trace, clock, read_trace
from raycl.training.workers.memory import forget_peak, peak_memory_mb
from raycl.types import Phase


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (0.6, "0:01"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (36061, "10:01:01"),
    ],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def result(loss: float) -> StepResult:
    return StepResult(loss, 1.0, 0.1, 100)


def test_where_attempts_overlap_the_later_one_stands(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    assert read_trace(storage) == []
    for attempt, steps in ((1, {(0, 1): 1.0, (0, 2): 2.0, (0, 3): 3.0}), (2, {(0, 3): 30.0, (1, 1): 40.0})):
        trace = Trace(storage, attempt)
        for (phase, step), loss in steps.items():
            trace.add(Phase(phase, "task", ()), step, result(loss), 0.5)
            trace.flush()
    assert [(r["phase"], r["step"], r["loss"]) for r in read_trace(storage)] == [
        (0, 1, 1.0),
        (0, 2, 2.0),
        (0, 3, 30.0),
        (1, 1, 40.0),
    ]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    storage.write("trace/attempt-0001.jsonl", b'{"phase": 0, "step": 1}\n{"pha\n')
    with pytest.raises(StorageError, match=r"attempt-0001.jsonl' line 2 is not JSON"):
        read_trace(storage)


def test_progress_is_logged_at_intervals_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr("raycl.training.records.progress.time.monotonic", lambda: now[0])
    lines: list[str] = []
    handler = logging.Handler()
    handler.setLevel(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("raycl")
    monkeypatch.setattr(logger, "handlers", [handler])
    caplog.set_level(logging.INFO, "raycl")
    progress, phase = Progress(5.0, phases=3), Phase(1, "animal", ())
    progress.begin(phase, 40, 10, 2, 30, prepared_s=60.0)
    said = []
    for step in range(3, 11):
        now[0] += 2
        said.append(progress.step(phase, step, 10, result(0.25), 2.0))
    assert said == [False, False, True, False, False, True, False, True]
    assert lines[0] == "[2/3] animal: 40 rows, 10 steps, continuing after step 2"
    assert (
        lines[1] == "[2/3] animal  step 5/10  loss 0.2500  50 tokens/s  training left: 0:10 in this task, 2:10 in all"
    )


def test_a_cpu_run_does_not_query_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    forget_peak()  # without a CUDA context, which would take memory of the GPU
    assert peak_memory_mb(torch.device("cpu")) > 1.0
    assert not torch.cuda.is_initialized()
