"""The host's word between two tasks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from raycl.storage import Storage
from raycl.training.records.run_folder import is_stopped, read_decision, wait_for_decision, write_decision


def test_a_stop_signal_is_for_its_phase_alone(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    assert read_decision(storage, 1) is None and not is_stopped(storage, 1)
    write_decision(storage, 1, continues=True)
    write_decision(storage, 2, continues=False)
    assert (read_decision(storage, 1), read_decision(storage, 2), read_decision(storage, 3)) == (True, False, None)
    assert not is_stopped(storage, 1) and is_stopped(storage, 2) and not is_stopped(storage, 0)


@pytest.mark.parametrize("continues", [True, False])
def test_workers_wait_for_the_stop_signal(tmp_path: Path, continues: bool) -> None:
    storage = Storage.at(tmp_path)
    teller = threading.Timer(0.2, write_decision, (storage, 1, continues))
    teller.start()
    began = time.monotonic()
    assert wait_for_decision(storage, 1) is continues
    assert time.monotonic() - began > 0.15
    teller.join()


def test_a_missing_answer_does_not_block_the_run(tmp_path: Path) -> None:
    assert wait_for_decision(Storage.at(tmp_path), 1, patience_s=0.1) is True
