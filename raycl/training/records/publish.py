"""The end of a task, as the bank sees it: its adapters published, then a snapshot of all adapters so far.

Publishing the same again (an attempt that died before its checkpoint) gives the versions that are there already.
What it does not know: who reads the bank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from raycl.bank import Bank
from raycl.bank.manifest import ModelFacts, TaskFacts, dump, parse_snapshot
from raycl.bank.pruning import removed_from
from raycl.bank.routers import put_router
from raycl.errors import BankError, CheckpointError
from raycl.methods.base import Learned
from raycl.storage import Storage
from raycl.training.records.checkpoint import read_snapshot
from raycl.training.records.journal import RunState
from raycl.training.settings import BankConfig
from raycl.training.training_context import Parts
from raycl.types import Stage, Task

log = logging.getLogger("raycl")


def open_bank(config: BankConfig, storage: Storage) -> Bank:
    """The configured bank, or the run's own."""
    return Bank(Storage.at(config.dir).patient(storage.patience_s)) if config.dir else Bank(storage.sub("bank"))


def publish(
    parts: Parts, stage: Stage, learned: Learned, storage: Storage, before: dict[str, Any] | None
) -> tuple[dict[str, Any], bytes]:
    """Publish a stage's adapters and a snapshot; only rank 0 calls it.

    Args:
        before: the facts that this returned at the stage before, None at the first.

    Returns:
        facts for the ledger (bank address, snapshot number and `name -> version`), and the snapshot's record.
    """
    bank = open_bank(parts.bank, storage)
    codec = parts.backbone.codec
    backbone = ModelFacts(name=parts.info.tree["backbone"]["name"], sha256=parts.identity, kind=codec.kind)
    made = {"run": storage.uri, "fingerprint": parts.info.fingerprint, "stage": stage.index, "stage_name": stage.name}
    seen = [task for done in parts.stages[: stage.index + 1] for task in done.tasks]
    mine = [task.name for task in (stage.tasks if parts.method.own_adapters else seen)]
    known = {name: bank.versions(name) for name in learned.adapters}
    fresh = [
        bank.publish(name, state, backbone, mine, made, extras=learned.extras.get(name))
        for name, state in learned.adapters.items()
    ]
    names = {manifest.name for manifest in fresh}
    parent = bank.open(before["snapshot"]) if before else None
    kept = []
    if parent is not None:
        kept = [(entry, parent.layouts[entry.layout]) for entry in parent.adapters if entry.name not in names]
    router, encoder = put_router(bank, parts.method.router_state())
    snapshot = bank.snapshot(
        [*fresh, *kept],
        backbone,
        router,
        [_facts(parts, task) for task in seen],
        encoder,
        parent=parent.number if parent else None,
        made={**made, "config": parts.info.tree},
        again=all(manifest.version in known[manifest.name] for manifest in fresh),
    )
    versions = {entry.name: entry.version for entry in snapshot.adapters}
    return {"bank": bank.storage.address, "snapshot": snapshot.number, "adapters": versions}, dump(snapshot)


def publish_again(bank: Bank, storage: Storage, state: RunState, goes_on: bool) -> None:
    """Put back the run's snapshots that the bank has lost, from the checkpoints that are left; the rest is said.

    Args:
        goes_on: the run has stages to come: the next snapshot is made from the last one, even if that was pruned.

    Raises:
        BankError: that one is lost for good. StorageError: bank or run are out of reach.
    """
    numbers, removed = set(bank.snapshots()), removed_from(bank.storage).snapshots
    published = {record["bank"]["snapshot"]: record["stage"] for record in state.stages if record["bank"]}
    copies = _copies(storage, state.checkpoints)
    published |= {number: stage for number, (stage, _) in copies.items() if number not in published}
    for number, stage in sorted(published.items()):
        needed = goes_on and number == max(published)
        if _is_there(bank, number, numbers) or (number in removed and not needed):
            continue
        what = f"snapshot {number} of stage {stage} is gone from the bank '{bank.storage.uri}' or damaged"
        try:
            if number not in copies:
                raise BankError(f"no checkpoint of stage {stage} is kept to publish it again from")
            bank.put_back(copies[number][1])
        except BankError as error:
            if needed:
                raise BankError(
                    f"{what}, and the next stage is built on it: {error}; restore it from a copy"
                ) from error
            log.warning("%s: %s", what, error)
        else:
            log.warning("%s: published again", what)


def _copies(storage: Storage, checkpoints: Sequence[str]) -> dict[int, tuple[int, bytes]]:
    """Number of a snapshot -> its stage and the copy of its record in a checkpoint."""
    found: dict[int, tuple[int, bytes]] = {}
    for name in checkpoints:
        with suppress(CheckpointError):
            record = read_snapshot(storage, name)
            if record:
                snapshot = parse_snapshot(record, None)
                found[snapshot.number] = (int(snapshot.made["stage"]), record)
    return found


def _is_there(bank: Bank, number: int, numbers: Collection[int]) -> bool:
    if number not in numbers:
        return False
    try:
        bank.open(number)
    except BankError:
        return False
    return True


def _facts(parts: Parts, task: Task) -> TaskFacts:
    prompt = parts.stream.prompt(task, parts.backbone.codec)
    return TaskFacts(name=task.name, labels=task.labels, metric=task.metric, prompt=(prompt.prefix, prompt.suffix))
