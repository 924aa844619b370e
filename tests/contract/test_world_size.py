"""Two workers equal one, and any accumulation equals none: the loss of a step is a sum over all its tokens.

9 rows in batches of 4 leave a last batch of one row, so the second worker then has nothing but fill-ups.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from fork_server import ForkServer
from safetensors.torch import load
from tiny import ENGINES, KINDS, VARIANTS, WRITERS, Lab, exported, family, fits, matrix, run, trace

from raycl.methods.context import TaskContext
from raycl.methods.registry import METHODS, method_class, method_config
from raycl.operations.plan.arithmetic import GPUS, Cluster
from raycl.operations.plan.report import plan
from raycl.storage import Storage
from raycl.training.records.checkpoint import read_checkpoint

ROWS = 9
LEFT_AT = 5
"""Steps after which a run leaves its two workers: at the first checkpoint of the second task."""

CHOSEN = [
    *(("bert", "lora", engine, None) for engine in ENGINES),
    *(("mixtral", "lora-experts", engine, 1) for engine in ("torch", "zero2")),
    *(("t5", "lora", engine, None) for engine in ("torch", "zero3")),
    *(("bert", "finetune", engine, None) for engine in ("torch", "zero3")),
    *(("llama", "lora", engine, None) for engine in ("torch", "fsdp")),
    *(("bert", method, "fsdp", None) for method in ("finetune", "separate", "inflora")),
    *((kind, "sapt", "fsdp", 1) for kind in ("t5", "llama")),
    *((kind, "sapt-start", engine, None) for kind, engine in (("bert", "torch"), ("bert", "zero2"), ("llama", "fsdp"))),
    ("masked", "finetune", "fsdp", None),
    ("bert", "finetune+migu", "fsdp", 1),
    ("bert", "separate", "torch", None),
    *(("bert", "olora", engine, 1) for engine in ("torch", "zero3")),
    *(("bert", "agem", engine, micro) for engine, micro in (("torch", None), ("zero2", 1))),
    *(("bert", "ogd", engine, micro) for engine, micro in (("torch", None), ("zero2", 1))),
    *((kind, "ewc", engine, micro) for kind, engine, micro in (("bert", "torch", None), ("t5", "zero2", 1))),
    *((kind, "lwf", engine, micro) for kind, engine, micro in (("t5", "torch", 1), ("bert", "zero1", 1))),
    *(("bert", "gem", engine, micro) for engine, micro in (("torch", None), ("zero2", 1))),
    ("bert", "sdlora", "torch", 1),
    *(("t5", "gainlora", engine, 1) for engine in ("torch", "zero2")),
    *((kind, "der++", engine, micro) for kind, engine, micro in (("llama", "torch", 1), ("bert", "fsdp", None))),
    *((kind, "mbpa++", engine, micro) for kind, engine, micro in (("bert", "torch", 1), ("t5", "zero2", None))),
    *(("bert", "idbr", engine, micro) for engine, micro in (("torch", 1), ("fsdp", None), ("zero3", None))),
    *(("bert", "inflora", engine, micro) for engine, micro in (("torch", None), ("zero3", 1))),
    *((kind, "l2p", engine, micro) for kind, engine, micro in (("bert", "torch", None), ("t5", "zero2", 1))),
    ("t5", "moelora", "torch", 1),
    ("t5", "mocl", "zero2", 1),
    ("t5", "demix", "fsdp", 1),
    *(("bert", method, "torch", 1) for method in ("das", "hat")),
    *(("bert", "hat-adapter", engine, micro) for engine, micro in (("torch", None), ("zero3", 1))),
    *(("t5", "lfpt5-real", engine, micro) for engine, micro in (("torch", None), ("fsdp", 1))),
    *((kind, "epi", engine, None) for kind, engine in (("bert", "torch"), ("llama", "fsdp"))),
    ("masked", "finetune", "torch", None),
    *(("llama", "sapt", engine, micro) for engine, micro in (("torch", None), ("zero2", 1))),
    *((kind, "lora", engine, 1) for kind in ("bert", "t5") for engine in ("torch", "zero2")),
    ("bert", "lora", "zero3", 1),
    *(("bert", "finetune+migu", engine, micro) for engine, micro in (("torch", None), ("torch", 1), ("zero2", 1))),
    *(("t5", "lora+migu", engine, None) for engine in ("torch", "zero1", "zero3")),
]
"""Kind, method (and a modifier), engine, micro-batch size."""

OTHERS = [name for name in METHODS if name not in {case[1].removesuffix("-real") for case in CHOSEN}]
ALL_CASES = [*CHOSEN, *((next(kind for kind in KINDS if fits(kind, name)), name, "torch", 1) for name in OTHERS)]
"""Cases with every other method of the table too, so that a new one meets two workers without an entry here.

`make test` has those that look at rows which workers share out, and one method of each family of the others.
"""

TRIED = {"name": "sapt", "start_from": "nearest", "start_threshold": -1}
"""Settings by which the second task is tried from two sets of values."""

NEED_THE_TASK = ("separate", *(name for name in METHODS if method_config({"name": name}).needs_task))
"""Runs that cannot answer an unseen task."""

AGAIN = ("bert", "finetune", "fsdp", None)
"""The case that two workers also leave, and two continue."""

PLAIN = ("bert", "lora", "zero0", None)
"""The case whose engine moves the gradients of what is trained, and no more."""

SHARED = (
    *(TaskContext.sum, TaskContext.forward_pass, TaskContext.mean_loss, TaskContext.trial_losses),
    *(TaskContext.each_batch, TaskContext.gate_gradients, TaskContext.gradients, TaskContext.row_gradients),
    *(TaskContext.add_rows, TaskContext.add_samples),
)
"""Calls by which a method looks at rows that its workers share out."""

COLLECTIVE = re.compile(rf"context\.({'|'.join(call.__name__ for call in SHARED)})\(")


def needed(case: tuple[str, str, str, int | None]) -> tuple[Hashable, ...]:
    """Return what a sample must have of a case: of methods without such a call, one of each family."""
    kind, method, engine, micro = case
    name = method.removesuffix("-real")
    shares = name in METHODS and COLLECTIVE.search(inspect.getsource(sys.modules[method_class(name).__module__]))
    return kind, name if shares else family(name), engine, micro


CASES = sampled(ALL_CASES, keep=[AGAIN, PLAIN, ("bert", "slm", "torch", 1)], rarely=("zero3",), needed=needed)

LEFT = [("bert", "lora", "torch"), ("bert", "lora", "zero3"), ("t5", "finetune", "zero2"), ("t5", "finetune", "fsdp")]
"""Runs that two workers leave unfinished."""

Alone = Callable[[str, str], Storage]


def tree(lab: Lab, kind: str, method: str, engine: str, micro: int | None = None) -> dict[str, Any]:
    return lab.tree(kind, settings(method), ENGINES[engine], **sections(lab, kind, method, micro))


def settings(method: str) -> Any:
    """Return a method by its short name, without the modifier behind `+`."""
    return (WRITERS | VARIANTS | {"sapt-start": TRIED}).get(method, method.removesuffix("+migu"))


def sections(lab: Lab, kind: str, method: str, micro: int | None = None) -> dict[str, Any]:
    """Return sections of a config, with MIGU for `<method>+migu` and an unseen task if the method needs no task id."""
    result: dict[str, Any] = {"stream": stream(kind), "train": {"micro_batch_size": micro}}
    if method == "sapt-start":  # half an epoch must have two steps
        del result["stream"]["train_rows"]
    if method not in NEED_THE_TASK:
        result["stream"]["unseen"] = [lab.unseen]
    if method.endswith("+migu"):
        result["modifiers"] = [{"name": "migu", "skip_first_task": False}]
    return result


def stream(kind: str) -> dict[str, Any]:
    """Encoders with a mask learn texts."""
    return {"train_rows": ROWS, "objective": "mlm" if kind == "masked" else "answer"}


@pytest.fixture(scope="module")
def alone(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """(kind, method) -> the run of one worker on plain torch without accumulation."""
    done: dict[tuple[str, str], Storage] = {}

    def get(kind: str, method: str) -> Storage:
        if (kind, method) not in done:
            done[kind, method] = Storage.at(tmp_path_factory.mktemp(f"alone-{kind}-{method}"))
            run(lab.config(kind, settings(method), **sections(lab, kind, method)), done[kind, method])
        return done[kind, method]

    return get


@pytest.fixture(scope="module")
def together(lab: Lab, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run of every case by two workers."""
    root = tmp_path_factory.mktemp("together")
    jobs = [{"tree": tree(lab, *case), "folder": str(root / name(case)), "after": None} for case in CASES]
    jobs += [{"tree": tree(lab, *case), "folder": str(root / f"left-{name(case)}"), "after": LEFT_AT} for case in LEFT]
    again = {"tree": tree(lab, *AGAIN), "folder": str(root / "again")}
    jobs += [{**again, "after": LEFT_AT}, {**again, "after": None}]
    best = {"eval": {"select": "best_dev"}, "train": {"epochs": 4}, "checkpoint": {"every_steps": 3, "keep": 9}}
    best |= {"backbone": {"dtype": "bfloat16"}, "stream": {"tasks": lab.tasks[:1], "dev_fraction": 0.3}}
    jobs.append({"tree": lab.tree("bert", "finetune", ENGINES["zero2"], **best), "folder": str(root / "best")})
    jobs[-1]["after"] = None
    (root / "jobs.json").write_text(json.dumps(jobs))
    fork_server.pair("two_workers:main", root, root / "rendezvous", root / "jobs.json", seconds=280)
    return root


def name(case: tuple[Any, ...]) -> str:
    return "-".join(map(str, case))


def same(storage: Storage, expected: Storage, tolerance: float) -> None:
    """Check for losses within `tolerance`, the same tokens at the same rates, the same matrix."""
    for mine, other in zip(trace(storage), trace(expected), strict=True):
        assert mine[:2] == other[:2]
        assert mine[2:] == pytest.approx(other[2:], abs=tolerance, rel=tolerance)
    assert matrix(storage) == matrix(expected)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_two_workers_equal_one(together: Path, alone: Alone, case: tuple[str, str, str, int | None]) -> None:
    result = Storage.at(together / name(case))
    same(result, alone(case[0], case[1]), 1e-4)
    assert result.read_json("results.json")["workers"] == 2
    assert unseen(result) == unseen(alone(case[0], case[1])) and bool(unseen(result)) is (case[1] not in NEED_THE_TASK)
    assert rows_kept(result) == rows_kept(alone(case[0], case[1]))
    assert bool(rows_kept(result)) is case[1].endswith("+migu")
    for mine, other in zip(attended(result), attended(alone(case[0], case[1])), strict=True):
        assert mine == {task: pytest.approx(weights, abs=2e-4) for task, weights in other.items()}
    assert bool(attended(result)) is (case[1] in ("sapt", "sapt-start"))


def unseen(storage: Storage) -> dict[str, tuple[float, int]]:
    """Return the value and count of every task that was never trained."""
    cells = (storage.read_json("results.json")["unseen"] or {"cells": {}})["cells"]
    return {task: (cell["value"], cell["count"]) for task, cell in cells.items()}


def attended(storage: Storage) -> list[dict[str, list[float]]]:
    """Return the mean weights of each task's test texts after every phase: of all texts, on whichever worker."""
    summary = [phase.get("attention") for phase in storage.read_json("results.json")["phase_summaries"]]
    return [told["test"] for told in summary if told]


def rows_kept(storage: Storage) -> list[Any]:
    """Return the modifiers' summary of every phase: the same rows, chosen by both workers together."""
    summary = [phase.get("modifiers", {}).get("migu") for phase in storage.read_json("results.json")["phase_summaries"]]
    return [(told["steps"], told["layers"]) for told in summary if told]


@pytest.mark.parametrize("case", LEFT, ids=name)
def test_one_worker_resumes_a_run_of_two_on_another_engine(
    lab: Lab, together: Path, alone: Alone, case: tuple[str, str, str]
) -> None:
    kind, method, engine = case
    storage = Storage.at(together / f"left-{name(case)}")
    other = "zero1" if engine == "torch" else "torch"
    run(lab.config(kind, method, ENGINES[other], stream={"train_rows": ROWS}), storage, takes_over=True)
    same(storage, alone(kind, method), 1e-4)


def test_two_workers_resume_their_shares_bit_for_bit(together: Path) -> None:
    result, expected = Storage.at(together / "again"), Storage.at(together / name(AGAIN))
    assert result.read_json("results.json")["attempts"] == 2
    assert trace(result) == trace(expected) and matrix(result) == matrix(expected)
    assert exported(result) == exported(expected)
    last = result.sub(f"checkpoints/{result.list('checkpoints')[-1]}")
    assert "parameters-00001.safetensors" in last.list(), "at a task's end, too, each worker writes its share"
    weights = load(result.read(f"learned/{result.list('learned')[-1]}/model.safetensors"))
    parts = read_checkpoint(result, result.list("checkpoints")[-1]).parameters
    assert all(torch.equal(tensor, parts[f"model.{name}"]) for name, tensor in weights.items())


def test_two_workers_write_and_export_their_parts_of_the_best_weights(together: Path) -> None:
    """With masters beside a backbone in bfloat16, no worker ever has all of the best weights."""
    result = Storage.at(together / "best")
    *inside, end = (read_checkpoint(result, name) for name in result.list("checkpoints"))
    at = end.spent["selected_step"]
    assert at < end.steps, "else the last weights would do"
    best, after = (next(item for item in inside if item.step == step) for step in (at, at + 3))
    kept = {key.removesuffix("/selected"): value for key, value in after.optimizer.items() if "/selected" in key}
    (folder,) = result.list("learned")
    weights = load(result.read(f"learned/{folder}/model.safetensors"))
    written = {f"model.{name}": weight for name, weight in weights.items()}
    for holder in (kept, end.parameters, end.parameters | written):
        assert holder.keys() == best.parameters.keys()
        assert all(torch.equal(value, best.parameters[name]) for name, value in holder.items())
    for name in result.list("checkpoints")[-2:]:
        assert "parameters-00001.safetensors" in result.list(f"checkpoints/{name}")


@pytest.mark.parametrize("engine", [case[2] for case in CASES if case[:2] == ("bert", "lora") and case[3] is None])
def test_plain_engines_move_gradients_of_what_is_trained_alone(lab: Lab, together: Path, engine: str) -> None:
    result = Storage.at(together / name(("bert", "lora", engine, None)))
    trained = read_checkpoint(result, result.list("checkpoints")[-1]).parameters.values()
    moved, gradients = (
        result.read_json("results.json")["phase_times"][-1]["step_bytes"],
        4 * sum(p.numel() for p in trained),
    )
    assert moved == gradients if engine in ("torch", "zero0") else moved > gradients
    planned = plan(lab.config("bert", "lora", ENGINES[engine]), Cluster(GPUS["l4-24"], gpus=2)).traffic
    assert planned.gradients + planned.parameters == moved


ACCUMULATED = sampled(
    [
        *((kind, "torch", micro) for kind in ("bert", "t5", "llama") for micro in (1, 2)),
        *((kind, engine, 1) for kind in ("bert", "t5") for engine in ("zero0", "zero2")),
    ]
)


@pytest.mark.parametrize(("kind", "engine", "micro"), ACCUMULATED)
def test_accumulation_changes_nothing(
    lab: Lab, alone: Alone, tmp_path: Path, kind: str, engine: str, micro: int
) -> None:
    sections = {"stream": {"train_rows": ROWS}, "train": {"micro_batch_size": micro}}
    run(lab.config(kind, "lora", ENGINES[engine], **sections), Storage.at(tmp_path))
    same(Storage.at(tmp_path), alone(kind, "lora"), 1e-5)
