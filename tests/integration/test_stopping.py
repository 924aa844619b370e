"""A run that is asked to stop writes a checkpoint at once and ends; resumed, it is the run that was not disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from at_step import At
from axes import sampled
from tiny import Complete, Lab, exported, matrix, run, trace

from raycl.bank import Bank
from raycl.operations.banks.maintenance import verify
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.records.journal import read_state
from raycl.training.records.recorder import Listeners
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.control import Control
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.stopping import HostStop, request_stop, stop_of

ALONE = DistributedContext.alone(torch.device("cpu"))


def stopped(config: object, storage: Storage, step: int) -> None:
    """Train a run whose driver asks it to stop after `step` optimizer steps of both phases together."""
    context, open_engine = build(config, ALONE)  # type: ignore[arg-type]
    sink = At(step, lambda: request_stop(storage, "driver", "SIGTERM"))
    control = Control(storage, ALONE, "driver", poll_s=0.0)
    StreamLoop(context, open_engine, storage, ALONE, Listeners([sink]), control).run()


PLACES = {3: "phase000-step0000003", 7: "phase001-step0000003"}
RUNS = [("bert", "slm"), ("t5", "lora"), ("llama", "sapt"), ("bert", "finetune")]


@pytest.mark.parametrize(("kind", "method", "step"), sampled([(*run, step) for run in RUNS for step in PLACES]))
def test_a_run_stopped_inside_a_task_resumes_bit_for_bit(
    complete: Complete, tmp_path: Path, kind: str, method: str, step: int
) -> None:
    done, storage = complete(kind, method, "torch"), Storage.at(tmp_path)
    stopped(done.config, storage, step)
    state = read_state(storage)
    assert state.checkpoints[-1].startswith(PLACES[step]) and len(state.phases) == step // 4
    assert len(trace(storage)) == step
    run(done.config, storage)
    assert (trace(storage), matrix(storage)) == (trace(done.storage), matrix(done.storage))
    assert exported(storage) == exported(done.storage)
    if method != "finetune":
        assert verify(Bank(storage.sub("bank"))).problems == []


@pytest.mark.parametrize("modifiers", [["migu"]])
def test_modifiers_resume_bit_for_bit(complete: Complete, tmp_path: Path, modifiers: list[str]) -> None:
    done = complete("bert", "lora", "torch")
    tree = done.config.model_copy(update={"modifiers": done.config.__class__(modifiers=modifiers).modifiers})
    whole, storage = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "stopped")
    run(tree, whole)
    stopped(tree, storage, 7)
    run(tree, storage)
    assert (trace(storage), matrix(storage)) == (trace(whole), matrix(whole))


def test_a_checkpoint_that_was_due_is_written_once(complete: Complete, tmp_path: Path) -> None:
    done, storage = complete("bert", "lora", "torch"), Storage.at(tmp_path)
    stopped(done.config, storage, 2)
    assert [name[:20] for name in read_state(storage).checkpoints] == ["phase000-step0000002"]


def test_stopping_at_the_end_of_a_task_defers_evaluation(complete: Complete, tmp_path: Path) -> None:
    done, storage = complete("bert", "lora", "torch"), Storage.at(tmp_path)
    stopped(done.config, storage, 8)
    state = read_state(storage)
    assert state.checkpoints[-1].startswith("phase001-step0000004") and len(state.phases) == 1
    run(done.config, storage)
    assert (trace(storage), matrix(storage)) == (trace(done.storage), matrix(done.storage))


def test_a_stop_request_is_for_one_attempt(complete: Complete, tmp_path: Path) -> None:
    """A resumed run has another driver: the old request does not stop it again."""
    done, storage = complete("bert", "lora", "torch"), Storage.at(tmp_path)
    request_stop(storage, "driver", "SIGTERM")
    stopped(done.config, storage, 100)
    assert read_state(storage).checkpoints == [], "asked before the first step"
    context, open_engine = build(done.config, ALONE)
    StreamLoop(context, open_engine, storage, ALONE, control=Control(storage, ALONE, "next")).run()
    assert matrix(storage) == matrix(done.storage)


def test_a_stop_request_of_the_tuner_stops_the_run(complete: Complete, tmp_path: Path) -> None:
    """A sweep requests it once for all of its trials; the run's own folder records it afterwards."""
    done, storage, sweep = complete("bert", "lora", "torch"), Storage.at(tmp_path / "run"), Storage.at(tmp_path)
    context, open_engine = build(done.config, ALONE)
    sink = At(3, lambda: request_stop(sweep, "sweep", "SIGTERM"))
    control = Control(storage, ALONE, "driver", poll_s=0.0, host=HostStop(sweep.address, "sweep"))
    StreamLoop(context, open_engine, storage, ALONE, Listeners([sink]), control).run()
    assert read_state(storage).checkpoints[-1].startswith("phase000-step0000003")
    request = stop_of(storage, "driver")
    assert request is not None and request.reason == "SIGTERM"


@pytest.mark.parametrize("engine", ["zero2"])
def test_other_engines_stop_too(complete: Complete, tmp_path: Path, engine: str) -> None:
    done, storage = complete("bert", "slm", engine), Storage.at(tmp_path)
    stopped(done.config, storage, 7)
    assert read_state(storage).checkpoints[-1].startswith("phase001-step0000003")
    run(done.config, storage)
    assert (trace(storage), matrix(storage)) == (trace(done.storage), matrix(done.storage))


def test_a_run_that_dies_while_a_task_is_tracked_tracks_it_again(lab: Lab, tmp_path: Path) -> None:
    """Its numbers are sent before the journal has the task: after a crash they repeat, and are never missing."""
    config, storage, rows = lab.config("bert", "lora"), Storage.at(tmp_path), list[int]()

    class Follower(At):
        def table(self, task: int, name: str, columns: object, values: object) -> None:
            rows.append(task)
            if rows == [1]:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, storage, sink=Follower(0, lambda: None))
    run(config, storage, sink=Follower(0, lambda: None))
    assert rows == [1, 1, 2]
