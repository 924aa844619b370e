"""`eval.mode=overlap`: the same run as with evaluation inline, whenever the rows come and wherever it is stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from late_scorer import LateScorer
from tiny import Lab, Stop, exported, matrix, run, trace

from raycl import config as configs
from raycl.errors import CheckpointError, ConfigError, RunError
from raycl.launch import driver
from raycl.launch.scoring import needs_scorer, scorer_resources
from raycl.operations.sweep.config import SweepConfig
from raycl.operations.sweep.drive import make_plan
from raycl.operations.sweep.folder import SweepFolder
from raycl.run import scoring
from raycl.run.config import RunConfig
from raycl.storage import Storage
from raycl.training.records.journal import read_state

OVERLAP = {"mode": "overlap"}
STEPS = 4


def configs_of(lab: Lab, kind: str, method: Any, **sections: Any) -> tuple[RunConfig, RunConfig]:
    """The run with evaluation inline, and beside training; one checkpoint is kept, and one is written every step."""
    sections = {"checkpoint": {"keep": 1, "every_steps": 1}, **sections}
    return lab.config(kind, method, **sections), lab.config(kind, method, eval=OVERLAP, **sections)


def predictions(storage: Storage) -> dict[str, bytes]:
    return {name: storage.read(name) for name in storage.files("predictions")}


def same_results(found: Storage, expected: Storage) -> None:
    """Every step, score, answer, summary and exported byte; times differ."""
    assert trace(found) == trace(expected)
    assert matrix(found) == matrix(expected) and exported(found) == exported(expected)
    assert predictions(found) == predictions(expected) != {}
    mine, theirs = (storage.read_json("results.json") for storage in (found, expected))
    for key in ("finished", "fingerprint", "matrix", "unseen", "untrained", "metrics", "phase_summaries"):
        assert mine[key] == theirs[key], key
    assert mine["finished"] and all(times["eval_s"] > 0 for times in mine["phase_times"])


@pytest.mark.parametrize(
    ("kind", "method", "sections"),
    [
        ("bert", "slm", {"modifiers": {"migu": {}}}),
        ("t5", "sapt", {"stream": "unseen"}),
        ("llama", "separate", {}),
        ("bert", "finetune", {}),
    ],
)
def test_rows_that_come_late_are_those_of_the_run_that_waits_for_them(
    lab: Lab, tmp_path: Path, kind: str, method: str, sections: dict[str, Any]
) -> None:
    if "stream" in sections:
        sections = {"stream": {"unseen": [lab.unseen]}}
    inline, overlap = configs_of(lab, kind, method, **sections)
    expected, storage = Storage.at(tmp_path / "inline"), Storage.at(tmp_path / "overlap")
    run(inline, expected)
    scorer = LateScorer(overlap, storage)
    run(overlap, storage, scorer=scorer)
    same_results(storage, expected)
    assert len(scorer.begun) == 1, "beside the last task; the workers score the last row"
    assert read_state(storage).scored == 2 and len(storage.list("checkpoints")) == 1


def test_a_row_that_is_not_scored_is_kept_through_stops_and_errors(lab: Lab, tmp_path: Path) -> None:
    inline, overlap = configs_of(lab, "bert", "lora")
    expected, storage = Storage.at(tmp_path / "inline"), Storage.at(tmp_path / "overlap")
    run(inline, expected)
    with pytest.raises(Stop):
        run(overlap, storage, after=STEPS + 2, scorer=LateScorer(overlap, storage))
    state, results = read_state(storage), storage.read_json("results.json")
    assert (len(state.phases), state.scored, results["finished"]) == (1, 0, False)
    pending = state.phases[0]["pending"]
    assert state.checkpoints[0] == pending != state.checkpoints[-1], "the row's checkpoint, though one is kept"
    scorer = LateScorer(overlap, storage, fails_at=0)
    with pytest.raises(RunError, match="died"):
        run(overlap, storage, scorer=scorer)
    assert scorer.begun == [pending]
    assert read_state(storage).checkpoints[-1].startswith(f"phase001-step{STEPS - 1:07d}"), "up to the last step"
    last = LateScorer(overlap, storage)
    run(inline, storage, scorer=last)  # the mode may change when the run continues
    assert last.begun == [pending]
    same_results(storage, expected)


def test_a_process_is_needed_beside_every_task_but_the_last(lab: Lab, tmp_path: Path) -> None:
    inline, overlap = configs_of(lab, "bert", "lora")
    storage = Storage.at(tmp_path)
    assert needs_scorer(overlap, read_state(storage), 2) and not needs_scorer(overlap, read_state(storage), 1)
    assert not needs_scorer(inline, read_state(storage), 2)
    with pytest.raises(Stop):
        run(overlap, storage, after=STEPS + 2, scorer=LateScorer(overlap, storage))
    assert needs_scorer(inline, read_state(storage), 2), "a row is left"
    run(inline, storage, scorer=LateScorer(inline, storage))
    assert not needs_scorer(overlap, read_state(storage), 2)


def test_the_process_scores_every_row_with_parts_that_it_built_ahead(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the test's own process, which keeps its priority and its log."""
    overlap = lab.config("llama", "lora", eval=OVERLAP, checkpoint={"keep": 9}, output={"dir": str(tmp_path)})
    prepared = driver.prepare(overlap)
    run(overlap, prepared.storage, scorer=LateScorer(overlap, prepared.storage))
    raised: list[int] = []
    monkeypatch.setattr(os, "nice", raised.append)
    monkeypatch.setattr(scoring.log, "handlers", [])
    monkeypatch.setattr(scoring.log, "propagate", True)
    job = {**driver.job_of(prepared, driver.RunOptions(), "driver"), "scorer": {"CPU": 1.0, "GPU": 0.0}}
    process = scoring.ScoringProcess(job, scoring.own_process())
    state, parts = read_state(prepared.storage), []
    ends = [max(name for name in state.checkpoints if name.startswith(f"phase{phase:03d}")) for phase in (0, 1)]
    for number, (name, record) in enumerate(zip(ends, state.phases, strict=True)):
        assert process._next is not None
        parts.append(process._next.result())
        found = process.score(name)
        assert found.row == record["row"] and len(found.lines) == number + 1
        assert process.progress() == sum(range(number + 2))
    with pytest.raises(CheckpointError):
        process.score("phase009-none")
    assert process._next is None, "an error leaves nothing built"
    assert process.score(ends[0]).row == state.phases[0]["row"]
    assert parts[0] is not parts[1] and raised == [scoring.NICENESS]


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"launch": {"fresh_workers_per_task": True}}, "launch.fresh_workers_per_task=true"),
        ({"engine": "fsdp"}, "engine=fsdp"),
        ({"engine": {"name": "deepspeed", "zero_stage": 3}}, "engine.zero_stage=3"),
    ],
)
def test_what_cannot_score_rows_beside_training_is_refused(lab: Lab, sections: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"eval.mode=overlap .*{named}"):
        lab.config("bert", eval=OVERLAP, **sections)


@pytest.mark.parametrize("host", [{"in_process": True}, {"awaits_decision": True}])
def test_hosts_that_need_a_row_at_once_refuse_it(lab: Lab, tmp_path: Path, host: dict[str, bool]) -> None:
    prepared = driver.prepare(lab.config("bert", eval=OVERLAP, output={"dir": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"use eval\.mode=inline"):
        driver.train(prepared, driver.RunOptions(**host))


def test_a_sweep_refuses_it_before_a_trial_starts(lab: Lab, tmp_path: Path) -> None:
    base, space = lab.tree("bert"), {"eval.mode": {"choice": ["inline", "overlap"]}}
    sweep = configs.validate(SweepConfig, {"name": "mine", "base": base, "space": space})
    with pytest.raises(ConfigError, match=r"a sweep.* use eval\.mode=inline"):
        make_plan(sweep, SweepFolder(Storage.at(tmp_path), "mine"))


@pytest.mark.parametrize(("given", "of_a_worker", "gpus"), [(None, 1.0, 1.0), (None, 0.0, 0.0), (0.5, 1.0, 0.5)])
def test_the_process_has_as_many_gpus_as_a_worker(
    lab: Lab, given: float | None, of_a_worker: float, gpus: float
) -> None:
    config = lab.config("bert", eval={**OVERLAP, "overlap_gpus": given})
    assert scorer_resources(config, of_a_worker) == {"CPU": 1.0, "GPU": gpus}
