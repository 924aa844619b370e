"""Every method on every engine and kind of backbone: streams run, stop and continue; frozen parameters do not change.

All methods meet all kinds on plain torch; the two that differ in what they train meet every ZeRO stage on the encoder
and those that partition on the text backbones; methods with something of their own meet those on the encoder, and
SAPT's prompts one of them where they are most used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Condition
from typing import Any

import pytest
import torch
from axes import FULL, sampled
from complete_runs import CRASHES
from crash_copies import left_after
from tiny import (
    ENGINES,
    KINDS,
    RUNS,
    RUNS_BY_KIND,
    SAMPLE,
    TASKS,
    VARIANTS,
    Complete,
    Done,
    Lab,
    Stop,
    matrix,
    run,
    trace,
)

from raycl.bank import Bank
from raycl.errors import StorageError
from raycl.operations.banks.maintenance import verify
from raycl.operations.report.matrix_picture import draw_matrix
from raycl.storage import Storage
from raycl.testing.checks import check_files, check_frozen, check_results, check_same
from raycl.training import stream_loop
from raycl.training.assembly import build
from raycl.training.engines.engine import TorchEngine
from raycl.training.phase import step
from raycl.training.phase.evaluation import StreamEvaluation
from raycl.training.records import recorder
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint
from raycl.training.records.journal import read_state
from raycl.training.records.recorder import Listeners
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

SHARDING = ("fsdp", "zero2", "zero3")
OWN = ("slm", "sapt", "olora", "inflora", "sdlora", "gainlora", "separate", "joint")
"""Methods that put more before an engine than `lora` and `finetune` do; IncLoRA is in O-LoRA, replay is its learner."""

ALL_CASES = [
    *((kind, method, "torch") for kind, method in RUNS_BY_KIND),
    *(("bert", method, engine) for engine in ENGINES if engine != "torch" for method in ("lora", "finetune")),
    *(("bert", method, engine) for engine in SHARDING for method in OWN),
    ("t5", "sapt-prompt", "zero2"),
    *(("bert", method, "zero2") for method in ("agem", "ewc", "lwf", "ogd")),
    *((kind, "l2p", "zero2") for kind in KINDS),
    ("bert", "l2p", "zero3"),
    *(("bert", "moelora", engine) for engine in SHARDING),
    *(("t5", method, engine) for method in ("mocl", "progprompt") for engine in SHARDING),
    *(("llama", method, "fsdp") for method in ("prompt", "adapter", "mocl-prefix", "progprompt")),
    *(("bert", method, "zero3") for method in ("prompt", "adapter", "progprompt", "mocl")),
    *(("bert", method, engine) for method in ("hat-adapter", "das", "hat") for engine in SHARDING),
    *(("bert", "epi", engine) for engine in ("fsdp", "zero3")),
    *(("t5", "lfpt5-real", engine) for engine in SHARDING),
    *((kind, method, engine) for kind in KINDS[1:] for method in ("lora", "finetune") for engine in SHARDING),
    ("llama", "sapt", "fsdp"),
    ("t5", "sapt-prompt", "fsdp"),
]
ZERO = tuple(engine for engine in ENGINES if engine != "torch")
"""Engines that take several times as long."""
ALWAYS = [("bert", "lora", "torch"), ("t5", "sapt-prompt", "zero2"), ("bert", "slm", "zero3")]
CASES = sampled(ALL_CASES, keep=[*((*pair, "torch") for pair in SAMPLE), *ALWAYS], rarely=ZERO)
"""In a sample: every method on the kind of backbone on which other suites look at it too, and every engine."""
STEPS = 4
"""Optimizer steps of one task."""
BETWEEN = RUNS if FULL else ("finetune", "slm", "sapt", "separate", "joint")
"""In a sample, each method stops inside both tasks and at the first one's end, and these before its evaluation too."""


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def done(case: tuple[str, str, str], complete: Complete) -> Done:
    return complete(*case)


def stop(*args: Any, **named: Any) -> None:
    """Raise `Stop` in the place of any function."""
    raise Stop


def test_a_stream_runs_and_fills_its_matrix(done: Done) -> None:
    check_results(done)
    results = done.storage.read_json("results.json")
    steps = trace(done.storage)
    assert all(entry["resident_memory_mb"] > 0 < entry["prepare_s"] for entry in results["phase_times"])
    assert results["prepare_s"] == sum(entry["prepare_s"] for entry in results["phase_times"])
    assert results["kept_mb_per_task"] > 0
    joint_steps = {1: 7, 2: STEPS + STEPS}  # one stored row more fills the last batch of 2 to 3
    assert len(steps) == joint_steps[len(results["phases"])]


@pytest.mark.parametrize(("kind", "method", "engine"), [case for case in CASES if case[2] != "torch"])
def test_all_engines_give_the_losses_of_plain_torch(complete: Complete, kind: str, method: str, engine: str) -> None:
    plain, result = (trace(complete(kind, method, name).storage) for name in ("torch", engine))
    for mine, other in zip(result, plain, strict=True):
        assert mine == pytest.approx(other, abs=1e-4, rel=1e-3)


def named(value: Any) -> str:
    """Return the part of a test's name that a case or a number is."""
    return "-".join(value) if isinstance(value, tuple) else str(value)


def stops(case: tuple[str, str, str]) -> Sequence[int | None]:
    """Return the numbers of steps of the first task after which a run is stopped.

    In a sample it is stopped behind the task's checkpoint, and three runs before that: these begin anew, or continue
    from it, whatever their method. None is a run that is not stopped there, as are a sample's runs on plain torch of
    other settings of its methods.
    """
    if FULL:
        return range(STEPS)
    return [None] if case[1] in VARIANTS and case[2] == "torch" else [min(CASES.index(case), STEPS - 1)]


@pytest.mark.parametrize(("case", "after"), [(case, after) for case in CASES for after in stops(case)], ids=named)
def test_stopped_anywhere_in_the_first_task_and_at_its_end_and_in_the_last(
    complete: Complete, tmp_path: Path, case: tuple[str, str, str], after: int | None
) -> None:
    """A stop behind the first task's checkpoint, and one in the last task alone, are what a crash there has left."""
    done = complete(*case)
    first, *others = (entry["steps"] for entry in done.storage.read_json("results.json")["phase_times"])
    if after is None:
        storage = left_after(done.storage, first + sum(others) - 1, tmp_path)
    elif after == CRASHES[0]:
        storage = left_after(done.storage, after, tmp_path)
    else:
        storage = Storage.at(tmp_path)
        with pytest.raises(Stop):
            run(done.config, storage, after=after)
    if after is not None:
        with pytest.raises(Stop):
            run(done.config, storage, on_phase=stop)
        if others:
            with pytest.raises(Stop):
                run(done.config, storage, after=sum(others) - 1)
    run(done.config, storage)
    check_same(storage, done.storage)


@pytest.mark.parametrize("method", BETWEEN)
def test_a_finished_run_is_read_and_takes_no_time_of_its_own(complete: Complete, tmp_path: Path, method: str) -> None:
    done = complete("bert", method, "torch")
    storage = done.copy(tmp_path)
    again = run(done.config, storage)
    assert again.recorder.results()["wall_s"] == done.storage.read_json("results.json")["wall_s"]
    check_same(storage, done.storage)


@pytest.mark.parametrize(("method", "engine"), [*((method, "torch") for method in BETWEEN), ("lora", "zero3")])
def test_stopped_between_training_and_evaluation(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, engine: str
) -> None:
    done, storage = complete("bert", method, engine), Storage.at(tmp_path)
    phases = len(done.context.phases)
    for phase in range(phases):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(StreamEvaluation, "row", stop)
            run(done.config, storage)
        steps = done.storage.read_json("results.json")["phase_times"][phase]["steps"]
        assert storage.list("checkpoints")[-1].startswith(f"phase{phase:03d}-step{steps:07d}")
        with pytest.raises(Stop):
            run(done.config, storage, after=0, on_phase=stop)
    check_same(storage, done.storage)
    assert len(storage.list("trace")) == phases, "what was trained is not trained again"


@pytest.mark.parametrize(
    ("method", "module", "function_name"),
    [
        ("finetune", recorder.checkpoints, "write_model"),
        ("finetune", recorder.checkpoints, "commit_checkpoint"),
        ("separate", recorder.checkpoints, "commit_checkpoint"),
        ("separate", Bank, "_create"),
        ("separate", Bank, "snapshot"),
    ],
)
def test_stopped_around_the_export(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, module: Any, function_name: str
) -> None:
    done, storage = complete("bert", method, "torch"), Storage.at(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(module, function_name, stop)
        run(done.config, storage)
    result = verify(Bank(storage.sub("bank")))
    assert result.problems == [] and result.snapshots <= 1, "a half-written publish is invisible"
    run(done.config, storage)
    check_same(storage, done.storage)
    assert verify(Bank(storage.sub("bank"))).leftovers == []


@pytest.mark.parametrize(("method", "engine"), [("slm", "torch"), ("finetune", "fsdp"), ("finetune", "zero2")])
def test_the_next_passes_run_while_a_checkpoint_is_written(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, engine: str
) -> None:
    done, storage, passes = complete("bert", method, engine), Storage.at(tmp_path), Condition()
    count, seen = step.loss_count, list[Any]()
    begin, write = recorder.checkpoints.begin_checkpoint, recorder.checkpoints.write_share

    def counted(batch: Batch) -> Any:
        with passes:
            seen.append(batch)
            passes.notify_all()
        return count(batch)

    def begun(*args: Any) -> Any:
        seen.clear()
        return begin(*args)

    def late(storage: Storage, name: str, checkpoint: Checkpoint, rank: int) -> Any:
        with passes:
            assert checkpoint.is_phase_end or passes.wait_for(lambda: seen, timeout=20)
        return write(storage, name, checkpoint, rank)

    monkeypatch.setattr(step, "loss_count", counted)
    monkeypatch.setattr(recorder.checkpoints, "begin_checkpoint", begun)
    monkeypatch.setattr(recorder.checkpoints, "write_share", late)
    run(done.config, storage)
    check_same(storage, done.storage)
    for name in storage.list("checkpoints"):
        mine, other = (read_checkpoint(item, name, partial=True) for item in (storage, done.storage))
        assert all(torch.equal(value, other.optimizer[key]) for key, value in mine.optimizer.items())
        assert all(torch.equal(value, other.parameters[key]) for key, value in mine.parameters.items())


@pytest.mark.parametrize("after", [1, 2])
def test_a_crash_or_an_error_while_a_checkpoint_is_written_leaves_the_one_before_it(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    done, storage = complete("bert", "finetune", "fsdp"), Storage.at(tmp_path)
    write, names = recorder.checkpoints.write_share, []

    def failing(storage: Storage, name: str, *args: Any) -> Any:
        names.append(name)
        if len(names) > after:
            storage.sub(f"checkpoints/{name}").write("parameters.safetensors", b"cut")
            raise StorageError("the disk is full")
        return write(storage, name, *args)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="the disk is full"):
        patch.setattr(recorder.checkpoints, "write_share", failing)
        run(done.config, storage)
    assert read_state(storage).checkpoints == names[:after] and storage.list("checkpoints") == names
    run(done.config, storage)
    check_same(storage, done.storage)


@pytest.mark.parametrize("engine", ["torch", "fsdp"])
def test_full_fine_tuning_copies_no_weights_at_a_tasks_end(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    done, storage = complete("bert", "finetune", engine), Storage.at(tmp_path)
    monkeypatch.setattr(TorchEngine, "parameters", stop)
    run(done.config, storage)
    check_same(storage, done.storage)


def test_frozen_weights_keep_every_bit(done: Done) -> None:
    check_frozen(done)


def test_no_run_writes_pickles_or_moving_names(done: Done) -> None:
    check_files(done)


@pytest.mark.parametrize("method", ["lora", "finetune", "separate"])
def test_scores_of_tasks_not_yet_learned_when_asked_for(lab: Lab, tmp_path: Path, method: str) -> None:
    storage = Storage.at(tmp_path)
    run(lab.config("bert", method, eval={"tasks": "all"}), storage)
    filled = [[score is not None for score in row] for row in matrix(storage)]
    assert filled == [[True, method != "separate"], [True, True]]


class Curves:
    """A tracker that keeps all that it is given."""

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, float]]] = {}
        self.tables: list[tuple[int, str, list[str], list[list[Any]]]] = []
        self.pictures: list[tuple[int, str, bytes]] = []

    def log(self, axis: str, at: int, metrics: dict[str, float]) -> None:
        assert all(name.startswith("train/") == (axis == "step") for name in metrics)
        for name, value in metrics.items():
            self.points.setdefault(name, []).append((at, value))

    def table(self, task: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self.tables.append((task, name, columns, rows))

    def picture(self, task: int, name: str, file: Path) -> None:
        self.pictures.append((task, name, file.read_bytes()[:4]))


@pytest.mark.parametrize("method", ["lora", "joint"])
def test_trackers_see_the_metrics_and_the_matrix(lab: Lab, tmp_path: Path, method: str) -> None:
    """They come after each phase, over the tasks learned so far; at the end they are those of results.json."""
    world, curves, storage = DistributedContext.alone(torch.device("cpu")), Curves(), Storage.at(tmp_path)
    context, open_engine = build(lab.config("bert", method), world)
    stream_loop.StreamLoop(context, open_engine, storage, world, Listeners([curves], draw=draw_matrix)).run()
    metrics, cells = storage.read_json("results.json")["metrics"], matrix(storage)
    last = {name: points[-1][1] for name, points in curves.points.items() if name.startswith("cl/")}
    shown = {"AP": "ap", "average_accuracy": "average_accuracy"}
    shown |= {} if method == "joint" else {"BWT": "bwt", "bwt_m": "bwt_m", "F.Ra": "f_ra"}
    assert last == {f"cl/{name}": metrics[key] for name, key in shown.items()}
    steps = 2 * STEPS if method == "lora" else 2 * STEPS - 1
    for name in ("loss", "learning_rate", "grad_norm", "tokens_per_second"):
        assert [step for step, _ in curves.points[f"train/{name}"]] == list(range(1, steps + 1))
    done = [1, 2] if method == "lora" else [1]
    assert [task for task, _ in curves.points["cl/AP"]] == done
    if method == "lora":
        assert curves.points["cl/AP"][0] == (1, cells[0][0])
    for number, task in enumerate(TASKS):
        scores = curves.points[f"eval/{task}/{context.stream.tasks[number].metric}"]
        assert scores == [(i + 1, row[number]) for i, row in enumerate(cells) if row[number] is not None]
    assert [(task, name, columns) for task, name, columns, _ in curves.tables] == [
        (task, "matrix", ["after", *TASKS]) for task in done
    ]
    assert curves.pictures == [(task, "matrix_picture", b"\x89PNG") for task in done]
    assert [row[1:] for row in curves.tables[-1][3]] == cells
