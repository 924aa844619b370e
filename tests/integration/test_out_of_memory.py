"""Out of memory is one sentence that names the setting to lower: in training, in evaluation, on a GPU and on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Lab, work

from raycl.backbone.encoder import EncoderBackbone
from raycl.errors import RunError
from raycl.launch import prepared_run


def too_much_for_the_cpu(*given: Any, **named: Any) -> Any:
    """Fail as a batch that is far too large does: torch's own allocator refuses it."""
    return torch.empty(2**60, dtype=torch.uint8)


def too_much_for_a_gpu(*given: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")


def too_much_for_python(*given: Any, **named: Any) -> Any:
    return bytearray(2**62)


def refused(lab: Lab, folder: Path, **sections: Any) -> str:
    config = lab.config("bert", output={"dir": str(folder), "name": "mine"}, **sections)
    with pytest.raises(RunError) as raised:
        work(prepared_run.prepare(config))
    return str(raised.value)


@pytest.mark.parametrize("refuse", [too_much_for_the_cpu, too_much_for_a_gpu, too_much_for_python])
def test_training_out_of_memory_names_settings(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., Any]
) -> None:
    monkeypatch.setattr(EncoderBackbone, "forward", refuse)
    said = refused(lab, tmp_path)
    assert "out of memory while training" in said and "\n" not in said
    assert "train.micro_batch_size (now 4)" in said
    assert ("backbone.gradient_checkpointing=true" in said) and "eval.batch_size" not in said


def test_settings_in_use_are_not_named(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncoderBackbone, "forward", too_much_for_the_cpu)
    said = refused(lab, tmp_path, train={"micro_batch_size": 1}, backbone={"gradient_checkpointing": True})
    assert "train.micro_batch_size" not in said and "gradient_checkpointing" not in said
    assert "stream.max_source_tokens (now 24)" in said


def test_evaluation_out_of_memory_names_settings(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncoderBackbone, "score_labels", too_much_for_the_cpu)
    said = refused(lab, tmp_path)
    assert "out of memory while evaluating" in said and "eval.batch_size (now 4)" in said
    assert "train.micro_batch_size" not in said and "\n" not in said


def test_other_errors_are_unchanged(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(EncoderBackbone, "forward", broken)
    config = lab.config("bert", output={"dir": str(tmp_path), "name": "mine"})
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        work(prepared_run.prepare(config))
