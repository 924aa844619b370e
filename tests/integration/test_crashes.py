"""A crash that comes back at the same step is not tried a third time, and says where it was; set-up is tried once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Lab, work

from raycl import config as configs
from raycl.errors import RunError
from raycl.launch import prepared_run
from raycl.launch.prepared_run import Prepared
from raycl.launch.status import status_of
from raycl.training import assembly
from raycl.training.engines.engine import TorchEngine
from raycl.training.records.journal import read_state
from raycl.training.setup.run_config import RunConfig


@pytest.fixture
def prepared(lab: Lab, tmp_path: Path) -> Prepared:
    tree = {**lab.tree("bert", "lora"), "output": {"dir": str(tmp_path), "name": "run"}}
    return prepared_run.prepare(configs.validate(RunConfig, tree))


def failing(patch: pytest.MonkeyPatch, is_due: Callable[[int], bool]) -> None:
    """A forward pass that fails at some of the calls of one attempt."""
    real, calls = TorchEngine.forward, [0]

    def forward(engine: TorchEngine, batch: Any) -> Any:
        calls[0] += 1
        if is_due(calls[0]):
            raise IndexError("index out of range in self")
        return real(engine, batch)

    patch.setattr(TorchEngine, "forward", forward)


def test_the_same_crash_twice_ends_the_run(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both attempts reach the fourth step of the first task: the second one from the checkpoint after two steps."""
    for number, kind in enumerate((IndexError, RunError)):
        with monkeypatch.context() as patch, pytest.raises(kind) as error:
            failing(patch, lambda call, due=4 - 2 * number: call == due)  # type: ignore[misc]
            work(prepared)
    said = str(error.value)
    assert re.match(r"IndexError: index out of range in self \(at .*test_crashes.py:\d+", said), said
    assert re.search(
        r"called at .*/raycl/.*\.py:\d+\), twice while training task 'colour' after step 3, in a ", said
    ), said
    rows = re.search(r"in a micro-batch of ((?:row \d+ of task 'colour'(?:, )?)+): it would come back", said)
    assert rows and 1 <= rows[1].count("row") <= 4 and "--resume" not in said, said
    status = status_of(prepared.storage.uri)
    assert status.state == "failed" and "IndexError" in str(status)
    work(prepared)  # the group that Ray starts next ends at once
    assert len(read_state(prepared.storage).attempts) == 2


def test_another_crash_is_tried_again(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    for due in (3, 4):  # the second attempt begins at the third step
        with monkeypatch.context() as patch, pytest.raises(IndexError):
            failing(patch, lambda call, due=due: call == due)  # type: ignore[misc]
            work(prepared)
    work(prepared)
    assert len(read_state(prepared.storage).phases) == 2


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'einops'"), TypeError("no such argument")])
def test_a_fault_of_the_set_up_is_tried_once(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def build(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(assembly, "build", build)
    with pytest.raises(RunError, match=rf"{type(error).__name__}: {error} \(at .*, while starting: it would come back"):
        work(prepared)
