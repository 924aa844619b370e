"""Manifests of adapters that a bank has lost are published again, byte for byte, from the snapshots that name them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tiny import Complete

from raycl import config as configs
from raycl.bank import Bank
from raycl.launch import driver, prepared_run
from raycl.operations.banks.maintenance import verify
from raycl.training.records.run_folder import CONFIG


@pytest.mark.parametrize("snapshot", ["there", "gone"])
def test_resume_publishes_a_lost_manifest_again(
    complete: Complete, tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: str
) -> None:
    """The newest adapter's comes from a checkpoint's copy of the snapshot too, where the snapshot is gone as well."""
    done = complete("bert", "slm", "torch")
    storage = done.copy(tmp_path)
    storage.write(CONFIG, configs.to_yaml(done.config).encode())
    bank = Bank(storage.sub("bank"))
    newest = bank.open(2)
    older = bank.open(1).adapters
    first, last = older[0], next(entry for entry in newest.adapters if entry not in older)
    paths = [Path(bank.storage.path(f"adapters/{record.name}/{record.version:06d}.json")) for record in (first, last)]
    whole = [path.read_bytes() for path in paths]
    paths[0].write_bytes(whole[0][:-9])
    paths[1].unlink()
    if snapshot == "gone":
        bank.storage.delete("snapshots/000002.json")
    with caplog.at_level(logging.WARNING, logger="raycl"):
        driver.train(prepared_run.reopen(storage.uri))
    assert [path.read_bytes() for path in paths] == whole and verify(bank).problems == []
    (said,) = [record.message for record in caplog.records if "the manifest of" in record.message]
    assert f"the manifest of {first}, {last} is gone from the bank" in said and bank.open(2) == newest
