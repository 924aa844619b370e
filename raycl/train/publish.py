"""The end of a task, as the bank sees it: its adapters published, then a snapshot of all adapters so far.

Publishing the same again (an attempt that died before its checkpoint) gives the versions that are there already.
What it does not know: who reads the bank.
"""

from __future__ import annotations

from typing import Any

from raycl.bank import Bank
from raycl.bank.manifest import ModelFacts, TaskFacts
from raycl.bank.routers import put_router
from raycl.methods.base import Learned
from raycl.storage import Storage
from raycl.train.parts import Parts
from raycl.types import Stage, Task


def open_bank(parts: Parts, storage: Storage) -> Bank:
    """The configured bank, or the run's own."""
    return Bank.at(parts.bank.dir) if parts.bank.dir else Bank(storage.sub("bank"))


def publish(
    parts: Parts, stage: Stage, learned: Learned, storage: Storage, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Publish a stage's adapters and a snapshot; only rank 0 calls it.

    Args:
        before: what this returned at the stage before, None at the first.

    Returns:
        bank address, snapshot number and `name -> version`, for the ledger.
    """
    bank = open_bank(parts, storage)
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
    return {"bank": bank.storage.address, "snapshot": snapshot.number, "adapters": versions}


def _facts(parts: Parts, task: Task) -> TaskFacts:
    prompt = parts.stream.prompt(task, parts.backbone.codec)
    return TaskFacts(name=task.name, labels=task.labels, metric=task.metric, prompt=(prompt.prefix, prompt.suffix))
