"""An adapter that was trained elsewhere becomes a task that the router selects, known by a few of its texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from raycl.adapters.card import METADATA
from raycl.adapters.state import NO_SUM
from raycl.backbone import BackboneConfig
from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.manifest import TaskInfo
from raycl.bank.states import get_router, put_router
from raycl.data.prompts import Prompt
from raycl.errors import AdapterError, BankError
from raycl.methods.registry import method_config
from raycl.operations.banks.exchange import peft_folder, read_peft
from raycl.routing.router import Router
from raycl.routing.routers import make_router, routed_text, router_class
from raycl.serve.snapshots.parts import router_of

TEXT = "{text}"
"""Stands for the text in a prompt."""

_TASKS = TypeAdapter(list[TaskInfo])


@dataclass(frozen=True)
class RoutedTask:
    """A task whose adapter was imported.

    Attributes:
        snapshot: with the task. adapters: names of its adapter in the bank.
        found: number of examples that the router gives to it.
    """

    snapshot: Snapshot
    adapters: list[str]
    found: int


def import_routed(
    bank: Bank,
    snapshot: Snapshot,
    address: str,
    name: str,
    backbone: BackboneConfig,
    texts: Sequence[str],
    prompt: str | None = None,
) -> RoutedTask:
    """Publish an adapter, and a snapshot whose router selects it for texts like the examples.

    Nothing of the snapshot's tasks changes. The new snapshot has no training state.

    Args:
        address: folder or `hf://` address of a LoRA in PEFT's layout. name: name of the task.
        texts: a handful of the task's texts.
        prompt: what stood around its texts, with `{text}` in it; None: what `raycl.json` beside the adapter says, or
            nothing.

    Raises:
        BankError: the router cannot take a task by examples, or has one of that name; another backbone; no examples.
        AdapterError: no plain LoRA.
    """
    if not texts:
        raise BankError("there are no examples: expected a handful of the task's texts, one a row")
    if name in [task.name for task in snapshot.tasks]:
        raise BankError(f"snapshot {snapshot.number} has a task '{name}' already: expected another --name")
    config = snapshot.provenance.get("config", {}).get("method")
    selects = config is not None and method_config(config).selects_router
    where, source = peft_folder(address)
    task = _task(where, name, prompt)
    before = router_of(bank, snapshot)
    if routed_text(snapshot.router, snapshot.router.settings) == "prompt":
        texts = [Prompt.of(task).written(text) for text in texts]
    queries_BC = before.encoder.embed(texts) if before.encoder is not None else torch.zeros(len(texts), 0)
    state, slots = router_class(snapshot.router).with_task(get_router(bank, snapshot), name, queries_BC, selects)
    adapter, model = read_peft(where, name, backbone)
    if adapter.is_alone:
        raise AdapterError(f"adapter '{name}' {NO_SUM}, and the router of snapshot {snapshot.number} may mix it")
    task = task if task.labels else task.model_copy(update={"labels": adapter.labels or None})
    fresh = [bank.publish(slot, adapter, model, [name], {"imported": source}) for slot in slots]
    info, encoder = put_router(bank, state)
    imported = [*snapshot.provenance.get("imported", []), {"task": name, "from": source}]
    new = bank.snapshot(
        NewSnapshot(
            [*fresh, *((entry, snapshot.layouts[entry.layout]) for entry in snapshot.adapters)],
            snapshot.backbone,
            info,
            [*snapshot.tasks, task],
            encoder,
            parent=snapshot.number,
            provenance={**snapshot.provenance, "imported": imported},
        )
    )
    owners = {entry.name: entry.tasks for entry in new.adapters}
    router = make_router(state, owners, [before.encoder] if before.encoder is not None else [])
    return RoutedTask(new, slots, _found(router, owners, name, texts))


def _task(where: Path, name: str, prompt: str | None) -> TaskInfo:
    """Return the task's prompt, metric and chat template, as given or as `METADATA` has them."""
    if prompt is not None:
        before, found, behind = prompt.partition(TEXT)
        if not found:
            raise BankError(f"the prompt {prompt!r:.80} has no {TEXT}: expected it where the text stands")
        return TaskInfo(name=name, prompt=(before, behind))
    if not (where / METADATA).is_file():
        return TaskInfo(name=name)
    try:
        tasks = _TASKS.validate_python(json.loads((where / METADATA).read_text())["tasks"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError, ValidationError) as error:
        raise BankError(
            f"'{where / METADATA}' does not describe tasks as raycl does ({error}): give --prompt, or remove the file"
        ) from error
    return tasks[0].model_copy(update={"name": name}) if tasks else TaskInfo(name=name)


def _found(router: Router, owners: Any, name: str, texts: Sequence[str]) -> int:
    mixture = router.route(texts, None)
    tasks = [owners[adapter][0] for adapter in mixture.names]
    rows = [dict.fromkeys(tasks, 0.0) for _ in texts]
    for row, weights in zip(rows, mixture.weights.tolist(), strict=True):
        for task, weight in zip(tasks, weights, strict=True):
            row[task] += weight
    return sum(max(row, key=lambda task: row[task]) == name for row in rows)
