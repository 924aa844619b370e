"""`launch.parallel_tasks`: tasks that are learned at the same time give the run that learns one after another, bit for
bit.

Worker groups are calls in this process here, one at a time in an order that a test chooses; tests of processes, and of
Ray, are at the end and in tests/ray.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from tiny import Lab, Stop, exported, matrix, run, trace

from raycl.bank import Bank, Snapshot
from raycl.errors import ConfigError, RunError, StoppedError
from raycl.launch import driver, worker
from raycl.launch.driver import RunOptions, job_of
from raycl.launch.local import in_process_worker
from raycl.launch.page.progress import progress_of
from raycl.launch.parallel_tasks import learn_at_once, parts_of
from raycl.launch.prepared_run import Prepared, extend, prepare, reopen
from raycl.launch.status import read_run, status_of
from raycl.storage import Storage
from raycl.training.definition.job import Resources, TaskPart
from raycl.training.phase import trainer
from raycl.training.records.checkpoint import read_checkpoint
from raycl.training.records.journal import read_state
from raycl.training.records.progress import TraceReader
from raycl.training.records.task_records import TaskRecords
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.setup import run_config
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.control import Control
from raycl.training.workers.distributed import DistributedContext
from raycl.training.workers.stopping import HostStop, request_stop

LOCAL = {"mode": "local", "cpus_per_worker": 1}
METHODS: dict[str, Any] = {
    "epi": "epi",
    "epi-lora": {"name": "epi", "value": "lora", "r": 2, "router_text": "input"},
    "slm": {"name": "slm"},
    "slm-prefix": {"name": "slm", "value": "prefix", "prompt_length": 3, "retrieval": {"rule": "vote"}},
}


def four(lab: Lab) -> list[dict[str, Any]]:
    """Return the two tasks of the laboratory and two more, which have their rows and labels again."""
    return [*lab.tasks, {**lab.tasks[0], "name": "again"}, {**lab.tasks[1], "name": "last"}]


def config_of(lab: Lab, kind: str, method: Any, folder: Path, at_once: int = 1, **sections: Any) -> RunConfig:
    """Return a run of four tasks in `folder`."""
    stream = {"tasks": four(lab), "dev_fraction": 0.3, **sections.pop("stream", {})}
    output = {"dir": str(folder.parent), "name": folder.name, "exists": "resume"}
    launch = {**LOCAL, "parallel_tasks": at_once}
    given = METHODS.get(method, method) if isinstance(method, str) else method
    return lab.config(kind, given, stream=stream, launch=launch, output=output, **sections)


Whole = Callable[[str, int], Storage]


@pytest.fixture(scope="module")
def whole(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """(method, number of tasks) -> the run that learns them one after another; for reading only."""

    @functools.cache
    def made(method: str, count: int) -> Storage:
        folder = tmp_path_factory.mktemp("runs") / "whole"
        driver.train(prepare(config_of(lab, "bert", method, folder, stream={"tasks": four(lab)[:count]})))
        return Storage.at(folder)

    return made


class Groups:
    """Worker groups in this process: one does its part after the other, and each may be stopped.

    Attributes:
        done: parts that were done, in order. stop: is called with each part before it is done.
    """

    def __init__(self, prepared: Prepared, before: Callable[[TaskPart], None] = lambda part: None) -> None:
        self.prepared, self.before = prepared, before
        self.done: list[tuple[str, str]] = []
        self._turn = threading.Lock()

    def __call__(self, part: TaskPart, stop: HostStop) -> None:
        with self._turn:
            self.before(part)
            options = RunOptions(in_process=Resources(1.0), stop=stop)
            job = replace(job_of(self.prepared, options), part=part)
            with in_process_worker():
                worker.work(job, worker.Worker(DistributedContext.alone(torch.device("cpu"))))
            self.done.append((part.kind, part.name))


def learn(config: RunConfig, before: Callable[[TaskPart], None] = lambda part: None) -> Groups:
    """Learn the tasks at the same time, and join them."""
    prepared = prepare(config)
    groups = Groups(prepared, before)
    learn_at_once(prepared, parts_of(prepared), None, groups)
    assert not parts_of(prepared).waiting
    driver.train(prepared)
    return groups


def snapshots(storage: Storage) -> list[Snapshot]:
    bank = Bank(storage.sub("bank"))
    return [bank.open(number) for number in bank.snapshots()]


def shown(snapshot: Snapshot) -> tuple[Any, ...]:
    """Return what must be equal of two snapshots: adapters, router, tasks, parent."""
    entries = [(entry.name, entry.version, entry.tensors, entry.tasks) for entry in snapshot.adapters]
    return snapshot.number, snapshot.parent, entries, snapshot.router, snapshot.tasks, snapshot.encoder


def assert_equal(one: Storage, other: Storage) -> None:
    """All that a run leaves is equal: steps, matrix, answers, summaries, every snapshot, and the last checkpoint."""
    assert trace(one) == trace(other) != []
    assert matrix(one) == matrix(other) and exported(one) == exported(other)
    states = [read_state(storage) for storage in (one, other)]
    for name in ("row", "summary", "unseen", "other_row", "untrained"):
        assert [phase.get(name) for phase in states[0].phases] == [phase.get(name) for phase in states[1].phases], name
    answers = [{name: storage.read(name) for name in storage.files("predictions")} for storage in (one, other)]
    assert answers[0] == answers[1] != {}
    assert list(map(shown, snapshots(one))) == list(map(shown, snapshots(other)))
    ends = []
    for storage, state in zip((one, other), states, strict=True):
        objects = TensorObjects(storage, storage.sub("bank"))
        ends.append(read_checkpoint(storage, state.checkpoints[-1], objects))
    assert ends[0].method == ends[1].method and ends[0].router == ends[1].router
    assert set(ends[0].frozen_state) == set(ends[1].frozen_state)
    for name, tensor in ends[0].frozen_state.items():
        assert torch.equal(tensor, ends[1].frozen_state[name]), name


@pytest.mark.parametrize(
    ("kind", "method"), sampled([(kind, method) for kind in ("bert", "llama") for method in METHODS])
)
def test_tasks_at_the_same_time_are_the_run_of_one_after_another(
    lab: Lab, whole: Whole, tmp_path: Path, kind: str, method: str
) -> None:
    """With the row of the bare backbone where texts are written."""
    tasks = four(lab)[: 2 if kind == "llama" else 4 if method == "epi" else 3]
    sections: dict[str, Any] = {"stream": {"tasks": tasks}}
    if kind == "llama":
        sections["eval"] = {"untrained": True}
        driver.train(prepare(config_of(lab, kind, method, tmp_path / "whole", **copy.deepcopy(sections))))
    groups = learn(config_of(lab, kind, method, tmp_path / "split", 3, **copy.deepcopy(sections)))
    names = [str(task["name"]) for task in tasks]
    assert sorted(groups.done) == sorted((what, name) for name in names for what in ("learn", "score"))
    expected = Storage.at(tmp_path / "whole") if kind == "llama" else whole(method, len(tasks))
    assert_equal(expected, Storage.at(tmp_path / "split"))
    split = Storage.at(tmp_path / "split")
    assert not [file for file in split.files("tasks") if "/checkpoints/" in file or "/objects/" in file]


class Lost(RunError):
    """Stands for what may happen to a worker group."""


def broken(*names: str, kind: str = "learn") -> Callable[[TaskPart], None]:
    """Return a function that fails before these parts."""

    def before(part: TaskPart) -> None:
        if part.kind == kind and part.name in names:
            raise Lost(f"'{part.name}' has no room")

    return before


def test_a_failed_task_is_named_and_the_others_are_kept(lab: Lab, whole: Whole, tmp_path: Path) -> None:
    config = config_of(lab, "bert", "epi", tmp_path / "split", 2)
    expected = (
        r"^learning task 'animal' failed: 'animal' has no room; the other tasks are kept: continue with --resume "
    )
    with pytest.raises(RunError, match=expected):
        learn(config, broken("animal"))
    split = Storage.at(tmp_path / "split")
    assert not read_state(split).phases
    status = status_of(split.uri)
    assert status.state == "failed" and status.message.startswith("learning task 'animal' failed")
    assert status.details["tasks"] == "0 of 4 done; learned and not joined yet: colour, again, last"
    groups = learn(config)
    assert groups.done[0] == ("learn", "animal") and ("learn", "again") not in groups.done
    assert ("score", "colour") not in groups.done, "its row needs no other task"
    assert_equal(whole("epi", 4), split)


def test_a_run_that_died_after_learning_learns_nothing_again(lab: Lab, whole: Whole, tmp_path: Path) -> None:
    """A group fails while it scores a row, and the run continues with one task after another: it takes no step."""
    with pytest.raises(RunError, match="scoring the row after task 'again' failed"):
        config = config_of(lab, "bert", "slm", tmp_path / "split", 2, stream={"tasks": four(lab)[:3]})
        learn(config, broken("again", kind="score"))
    split = Storage.at(tmp_path / "split")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raycl.training.phase.trainer.train_step", None)
        driver.train(reopen(split.address, overrides=("launch.parallel_tasks=1",)))
    assert_equal(whole("slm", 3), split)


def test_a_stopped_run_continues_each_task_from_its_checkpoint(
    lab: Lab, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop is requested after the second step of the second task: its group writes a checkpoint, and none follows."""
    expected = whole("slm", 3)
    config = config_of(lab, "bert", "slm", tmp_path / "split", 2, stream={"tasks": four(lab)[:3]})
    prepared = prepare(config)
    host, step, steps = HostStop(prepared.storage.address, "host"), trainer.train_step, []

    def counted(*given: Any) -> Any:
        steps.append(given)
        if len(steps) == 5:
            request_stop(prepared.storage, "host", "SIGTERM")
        return step(*given)

    monkeypatch.setattr(trainer, "train_step", counted)
    monkeypatch.setattr(worker, "Control", partial(Control, poll_s=0.0))
    groups = Groups(prepared)
    with pytest.raises(StoppedError, match=r"^stopped by SIGTERM, 1 of 3 tasks are learned; continue with --resume"):
        learn_at_once(prepared, parts_of(prepared), host, groups)
    assert len(steps) == 5
    learn(config)
    assert len(steps) == len(trace(expected))
    assert_equal(expected, Storage.at(tmp_path / "split"))


def test_a_run_that_was_stopped_inside_a_task_finishes_it_first(lab: Lab, whole: Whole, tmp_path: Path) -> None:
    """It has learned one task and a part of the next alone, and then learns the others at the same time."""
    split = Storage.at(tmp_path / "split")
    alone = config_of(lab, "bert", "epi", tmp_path / "split", checkpoint={"every_steps": 1})
    prepare(alone)
    with pytest.raises(Stop):
        run(alone, split, after=5)
    groups = learn(config_of(lab, "bert", "epi", tmp_path / "split", 3, checkpoint={"every_steps": 1}))
    learned = {name for kind, name in groups.done if kind == "learn"}
    assert groups.done[0] == ("begin", "animal") and learned == {"again", "last"}
    assert_equal(whole("epi", 4), split)


def test_tasks_that_follow_a_snapshot_are_learned_at_the_same_time(lab: Lab, whole: Whole, tmp_path: Path) -> None:
    driver.train(prepare(config_of(lab, "bert", "slm", tmp_path / "first", stream={"tasks": four(lab)[:1]})))
    bank, split = tmp_path / "first/bank", Storage.at(tmp_path / "split")
    words = [f"bank.start={bank}@main", "launch.parallel_tasks=2", "launch.mode=local", "launch.cpus_per_worker=1"]
    words += [f"stream.tasks={json.dumps(four(lab)[1:3])}", f"output.dir={tmp_path}", "output.name=split"]
    groups = learn(run_config.load_config(None, words))
    assert groups.done[0] == ("begin", "colour") and ("learn", "colour") not in groups.done
    full = whole("slm", 3)
    assert trace(split) == [step for step in trace(full) if step[0] > 0] != [] and matrix(split) == matrix(full)
    assert list(map(shown, snapshots(Storage.at(tmp_path / "first")))) == list(map(shown, snapshots(full)))


def test_tasks_that_are_added_are_learned_at_the_same_time(lab: Lab, whole: Whole, tmp_path: Path) -> None:
    driver.train(prepare(config_of(lab, "bert", "epi", tmp_path / "split", stream={"tasks": four(lab)[:2]})))
    added = [json.dumps(task) for task in four(lab)[2:]]
    prepared = extend(str(tmp_path / "split"), added, ("launch.parallel_tasks=2",))
    groups = Groups(prepared)
    learn_at_once(prepared, parts_of(prepared), None, groups)
    driver.train(prepared)
    assert [name for kind, name in groups.done if kind == "learn"] == ["again", "last"]
    assert matrix(whole("epi", 4)) == matrix(Storage.at(tmp_path / "split"))
    assert exported(whole("epi", 4)) == exported(Storage.at(tmp_path / "split"))


def test_a_damaged_checkpoint_of_the_run_costs_the_task_that_it_had_joined(
    lab: Lab, whole: Whole, tmp_path: Path
) -> None:
    """The run goes back by one task, which it learns itself, and joins those that are learned."""
    learn(config_of(lab, "bert", "epi", tmp_path / "split", 2, stream={"tasks": four(lab)[:2]}))
    split = Storage.at(tmp_path / "split")
    split.write(f"checkpoints/{read_state(split).checkpoints[-1]}/manifest.json", b"{}")
    added = [json.dumps(task) for task in four(lab)[2:]]
    prepared = extend(split.address, added, ("launch.parallel_tasks=2",))
    groups = Groups(prepared)
    learn_at_once(prepared, parts_of(prepared), None, groups)
    driver.train(extend(split.address, added, ("launch.parallel_tasks=1",)))  # it scores their rows itself
    assert [name for kind, name in groups.done if kind == "learn"] == ["again", "last"]
    full = whole("epi", 4)
    assert matrix(full) == matrix(split) and exported(full) == exported(split) and trace(full) == trace(split)


@pytest.mark.parametrize(
    ("method", "sections", "reason"),
    [
        ("sapt", {}, "with method 'sapt' and these settings a task depends on the tasks before it"),
        ({"name": "slm", "start_from": "nearest"}, {}, "with method 'slm' and these settings a task depends"),
        ({"name": "replay", "learner": "lora"}, {}, "with method 'replay' and these settings a task depends"),
        ({"name": "epi", "value": "lora"}, {"modifiers": ["migu"]}, "modifier 'migu' keeps what it has seen"),
        ("epi", {"stream": {"schedule": "separate"}}, "stream.schedule=separate has phases of another kind"),
    ],
)
def test_tasks_that_depend_on_each_other_are_refused(
    lab: Lab, tmp_path: Path, method: Any, sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^launch.parallel_tasks=2 learns tasks at the same time, but {reason}"):
        prepare(config_of(lab, "bert", method, tmp_path / "run", 2, **sections))
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(600)
def test_processes_of_this_machine_learn_tasks_and_one_of_them_is_killed(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `launch.mode=local` the other task is kept, and the next command continues the one whose process died."""
    caplog.set_level(logging.INFO, "raycl")
    long = {"stream": {"tasks": four(lab)[:3]}, "train": {"epochs_by_task": {"animal": 60}, "log_every_s": 0.1}}
    driver.train(prepare(config_of(lab, "bert", "epi", tmp_path / "whole", **copy.deepcopy(long))))
    config, split = config_of(lab, "bert", "epi", tmp_path / "split", 2, **long), Storage.at(tmp_path / "split")
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(driver.train, prepare(config))
        task = split.sub("tasks/001-animal")
        while not training.done() and not read_state(task).checkpoints:
            time.sleep(0.02)
        process = read_state(task).attempts[-1]["pid"]
        os.kill(process, signal.SIGSTOP)  # else it may come to its end before it is looked at
        while "'animal', step" not in status_of(split.uri).message:
            os.kill(process, signal.SIGCONT)
            assert not training.done()
            time.sleep(0.02)
            os.kill(process, signal.SIGSTOP)
        assert status_of(split.uri).state == "running"
        shown = progress_of(read_run(split), TraceReader(split))["tasks"][1]
        assert (shown["name"], shown["state"], shown["activity"]) == ("animal", "current", "training")
        os.kill(process, signal.SIGKILL)
        with pytest.raises(RunError, match=r"learning task 'animal' failed: its process died, .*; the other tasks are"):
            training.result()
    assert not multiprocessing.active_children()
    assert TaskRecords.of(split, prepare(config).phases[0]).learned is not None
    driver.train(prepare(config))
    assert_equal(Storage.at(tmp_path / "whole"), split)
    assert len(read_state(task).attempts) > len(read_state(split.sub("tasks/000-colour")).attempts)
    assert "animal: [2/3] animal: 10 rows, 180 steps, continuing after step" in caplog.text
    assert "[3/3] again: joined" in caplog.text
