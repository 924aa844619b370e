"""Settings that must not change what is learned: gradient checkpointing, bfloat16, offloading, a run folder on S3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axes import sampled
from crash_copies import copied_after, left_after
from tiny import ENGINES, KINDS, Complete, Lab, Stop, exported, matrix, run, trace

from raycl.storage import Storage


@pytest.mark.parametrize(
    ("kind", "method"),
    sampled(
        [(kind, method) for kind in KINDS for method in ("lora", "finetune")],
        keep=[("bert", "finetune"), ("t5", "lora"), ("llama", "lora")],
    ),
)
def test_gradient_checkpointing_gives_the_same_losses(
    lab: Lab, complete: Complete, tmp_path: Path, kind: str, method: str
) -> None:
    plain, saving = complete(kind, method, "torch").storage, Storage.at(tmp_path)
    run(lab.config(kind, method, backbone={"gradient_checkpointing": True}), saving)
    losses = [[step[2] for step in trace(storage)] for storage in (plain, saving)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [(kind, "torch") for kind in KINDS] + [("bert", f"zero{phase}") for phase in (1, 2, 3)] + [("bert", "fsdp")],
)
def test_bfloat16_is_near_float32_and_resumes_exactly(
    lab: Lab, complete: Complete, tmp_path: Path, kind: str, engine: str
) -> None:
    sections: dict[str, Any] = {"engine": ENGINES[engine], "backbone": {"dtype": "bfloat16"}}
    whole, config = Storage.at(tmp_path / "whole"), lab.config(kind, "lora", **sections)
    with copied_after(whole, 3):
        run(config, whole)
    stopped = left_after(whole, 3, tmp_path)  # inside the first task
    with pytest.raises(Stop):
        run(config, stopped, after=3)  # at its end
    run(config, stopped)
    assert trace(stopped) == trace(whole) and matrix(stopped) == matrix(whole)
    assert exported(stopped) == exported(whole)
    exact = trace(complete(kind, "lora", "torch").storage)
    near = pytest.approx([step[2] for step in exact], abs=0.1)
    assert [step[2] for step in trace(whole)] == near


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_optimizer_state_in_cpu_memory_gives_the_same_losses(lab: Lab, tmp_path: Path, phase: int) -> None:
    losses = []
    for offload in (False, True):
        engine = {"name": "deepspeed", "zero_stage": phase, "offload_optimizer": offload}
        storage = Storage.at(tmp_path / str(offload))
        migu = [{"name": "migu", "skip_first_task": False}]
        tasks = lab.tasks if phase == 2 else lab.tasks[:1]  # a second task begins alike in all phases
        config = lab.config("bert", "lora", engine, modifiers=migu, stream={"tasks": tasks})
        if offload:
            with pytest.raises(Stop):
                run(config, storage, after=3)
        run(config, storage)
        losses.append([step[2] for step in trace(storage)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_run_folder_on_s3_is_stopped_and_resumed_as_on_disk(complete: Complete, s3_uri: Callable[[str], str]) -> None:
    done, there = complete("bert", "lora", "torch"), Storage.at(s3_uri("mine"))
    config, here = done.config, done.storage
    with pytest.raises(Stop):
        run(config, there, after=3)
    run(config, Storage.at(there.address))
    assert trace(there) == trace(here) and matrix(there) == matrix(here)
    assert len(there.list("checkpoints")) == config.checkpoint.keep
