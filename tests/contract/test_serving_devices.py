"""Tests of where an endpoint computes: what is asked for, what is there, and what is reserved for it agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from service_client import bank_of, serving
from tiny import Taught

from raycl.errors import ConfigError
from raycl.serve.deployment.app import build_from
from raycl.serve.settings import ServeConfig


def test_a_gpu_that_is_not_there_is_refused_by_name(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # wherever this test runs
    with (
        pytest.raises(ConfigError, match=r"device is 'cuda', but torch sees no GPU .* expected 'auto' or 'cpu'"),
        serving(bank_of(taught("bert", "slm"), tmp_path), device="cuda"),
    ):
        pass


@pytest.mark.parametrize(
    ("device", "sees", "uses"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", False, "cuda")],
)
def test_replicas_use_what_is_reserved_for_them(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, sees: bool, uses: str
) -> None:
    """Ray hides no GPU from an actor that asked for none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    bank = bank_of(taught("bert", "slm"), tmp_path)
    tree = {"bank": bank.storage.uri, "device": device, "follow": {"enabled": True, "gated": True}}
    first = build_from(ServeConfig(**tree))._bound_deployment
    bound = {item.name: item for item in (first, *(given._bound_deployment for given in first.init_args[1:]))}
    takes = {name: item.ray_actor_options for name, item in bound.items()}
    takes["gate"] = bound["gate"].init_args[1]  # what it reserves during an evaluation
    reserved = {name: options.get("num_gpus", 0.0) > 0 for name, options in takes.items()}
    used = {name: item.init_args[0]["device"] == "cuda" for name, item in bound.items()}
    assert used == dict.fromkeys(("endpoint", "gate"), uses == "cuda")
    assert {name: reserved[name] for name in used} == used
