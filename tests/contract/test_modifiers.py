"""Gradient modifiers compose with every method on every engine: streams run, stop, go on, and every engine agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import ENGINES, Complete, Lab, Stop, exported, matrix, run, trace

from raycl.methods.registry import METHODS
from raycl.storage import Storage

MIGU = {"name": "migu", "threshold": 0.7, "skip_first_task": False}
CASES = [
    *(("bert", method, "torch") for method in METHODS),
    *((kind, method, "torch") for kind in ("t5", "llama") for method in ("lora", "finetune")),
    *(("bert", method, engine) for engine in ENGINES if engine != "torch" for method in ("lora", "finetune")),
]


def masked(lab: Lab, kind: str, method: Any, engine: str, **settings: Any) -> Any:
    train = settings.pop("train", {})
    return lab.config(kind, method, ENGINES[engine], modifiers=[{**MIGU, **settings}], train=train)


@pytest.fixture(scope="module")
def complete_masked(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(kind, method, engine, settings) -> storage of its complete run."""
    done: dict[str, Storage] = {}

    def get(kind: str, method: str, engine: str, **settings: Any) -> Storage:
        key = f"{kind}-{method}-{engine}-{settings}"
        if key not in done:
            done[key] = Storage.at(tmp_path_factory.mktemp(f"{kind}-{method}-{engine}"))
            run(masked(lab, kind, method, engine, **settings), done[key])
        return done[key]

    return get


@pytest.mark.parametrize(("kind", "method", "engine"), CASES)
def test_it_runs_with_every_method_and_stops_and_goes_on_bit_for_bit(
    lab: Lab, complete_masked: Any, complete: Complete, tmp_path: Path, kind: str, method: str, engine: str
) -> None:
    whole = complete_masked(kind, method, engine)
    results = whole.read_json("results.json")
    assert results["finished"]
    storage, steps = Storage.at(tmp_path), len(trace(whole))
    config = masked(lab, kind, method, engine)
    with pytest.raises(Stop):
        run(config, storage, after=steps - 1)
    run(config, storage)
    assert trace(storage) == trace(whole)
    assert matrix(storage) == matrix(whole)
    assert exported(storage) == exported(whole)
    assert storage.read_json("results.json")["stage_facts"] == results["stage_facts"]
    assert trace(whole) != trace(complete(kind, method, engine).storage), "the mask did nothing"


@pytest.mark.parametrize(("kind", "method", "engine"), [case for case in CASES if case[2] != "torch"])
@pytest.mark.parametrize("mask_update", [False, True])
def test_every_engine_gives_the_losses_of_plain_torch(
    complete_masked: Any, kind: str, method: str, engine: str, mask_update: bool
) -> None:
    plain, found = (trace(complete_masked(kind, method, name, mask_update=mask_update)) for name in ("torch", engine))
    for mine, other in zip(found, plain, strict=True):
        assert mine == pytest.approx(other, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("engine", ["torch", "zero0", "zero2", "zero3"])
@pytest.mark.parametrize("method", ["lora", "finetune"])
def test_a_threshold_of_zero_is_plain_training(
    complete_masked: Any, complete: Complete, method: str, engine: str
) -> None:
    plain = complete("bert", method, engine).storage
    found = complete_masked("bert", method, engine, threshold=0.0)
    assert trace(found) == trace(plain)
    assert exported(found) == exported(plain)
