"""Merging: one snapshot with the tasks of two, for methods whose tasks do not depend on each other."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.manifest import AdapterManifest, Layout, SnapshotAdapter
from raycl.bank.pruning import removed_from
from raycl.bank.states import get_router, get_state, put_router
from raycl.config import as_tree, remaining
from raycl.errors import BankError
from raycl.methods.base import at
from raycl.methods.registry import method_config
from raycl.routing.routers import router_class
from raycl.scoring.scored_task import recorded_settings
from raycl.training.definition.inputs import changes, different_versions, joined
from raycl.training.setup.snapshot_start import LIMITS
from raycl.types import RouterState

log: logging.Logger = logging.getLogger("raycl")

Entry = AdapterManifest | tuple[SnapshotAdapter, Layout]

READING = {"pooling": "auto", "bos": "tokenizer"}
"""Settings of the backbone that change what adapters read, and what snapshots without them have."""


def merge(bank: Bank, ours: Snapshot, theirs: Snapshot, other: Bank, with_samples: bool = False) -> Snapshot:
    """Return a snapshot of `bank` with the tasks of both; it answers as if one run had learned all of them.

    Args:
        theirs: snapshot of `other`, which may be the same bank; otherwise its objects are copied.
        with_samples: also copy what is kept with adapters, pseudo-samples above all: inputs of users.

    Raises:
        BankError: another backbone, encoder, method or router; tasks that depend on each other; names that mean
            different things on both sides.
    """
    _check(ours, theirs)
    known = {task.name: task for task in ours.tasks}
    for task in theirs.tasks:
        if known.setdefault(task.name, task) != task:
            raise BankError(
                f"task '{task.name}' has other labels, metric or prompt in {_names(ours, theirs)}: rename one"
            )
    state = _merged_router(get_router(bank, ours), get_router(other, theirs), ours, theirs)
    if method_config(ours.provenance["config"]["method"]).selects_router:
        state = router_class(state).selected(state, _dev_queries(bank, ours) | _dev_queries(other, theirs))
    router, encoder = put_router(bank, state)
    kept: list[Entry] = [(entry, ours.layouts[entry.layout]) for entry in ours.adapters]
    mine = {entry.name: entry for entry in ours.adapters}
    for entry in theirs.adapters:
        same = mine.get(entry.name)
        if same is None:
            is_here = other.storage.address == bank.storage.address
            kept.append((entry, theirs.layouts[entry.layout]) if is_here else _copied(bank, other, entry, with_samples))
        elif same.tensors != entry.tensors:
            raise BankError(
                f"adapter '{entry.name}' has different weights in {_names(ours, theirs)}: rename one of the tasks"
            )
    provenance: dict[str, Any] = {**ours.provenance, "merged": [ours.sha256, theirs.sha256]}
    provenance["inputs"] = joined(*(snapshot.provenance.get("inputs", {}) for snapshot in (theirs, ours)))
    if differing := different_versions(*(snapshot.provenance.get("versions", {}) for snapshot in (theirs, ours))):
        log.warning("%s were learned with other libraries: %s", _names(ours, theirs), differing)
        provenance["version_changes"] = [f"{_names(ours, theirs)} were learned with other libraries: {differing}"]
    return bank.snapshot(
        NewSnapshot(
            kept,
            ours.backbone,
            router,
            list(known.values()),
            encoder,
            parent=ours.number,
            provenance={**provenance, "config": _config(ours, theirs)},
        )
    )


def _check(ours: Snapshot, theirs: Snapshot) -> None:
    """Check that both were learned alike, and that no task's adapter depends on other tasks."""
    both = _names(ours, theirs)
    for what in ("backbone", "encoder"):
        our_model, two = getattr(ours, what), getattr(theirs, what)
        if (our_model and our_model.sha256) != (two and two.sha256):
            raise BankError(
                f"{both} cannot be merged: {what} '{our_model and our_model.name}' and '{two and two.name}' differ"
            )
    if changed := changes(*(snapshot.provenance.get("inputs", {}) for snapshot in (ours, theirs))):
        raise BankError(f"{both} cannot be merged, since they were learned from other inputs: {'; '.join(changed)}")
    configs = [snapshot.provenance.get("config") for snapshot in (ours, theirs)]
    if None in configs:
        raise BankError(f"{both} cannot be merged: one of them was not published by a run")
    backbones = [config.get("backbone", {}) for config in configs if config is not None]
    for key, default in READING.items():
        values = [settings.get(key, default) for settings in backbones]
        if values[0] != values[1]:
            raise BankError(f"{both} cannot be merged: backbone.{key} is '{values[0]}' and '{values[1]}'")
    methods = [(config["method"], config["stream"]["schedule"]) for config in configs if config is not None]
    whole = [(method_config(method), schedule) for method, schedule in methods]  # older ones lack younger settings
    alike = [(remaining(as_tree(settings), settings.by_task), schedule) for settings, schedule in whole]
    if alike[0] != alike[1]:
        named = [f"{method['name']} (schedule {schedule})" for method, schedule in methods]
        raise BankError(f"{both} cannot be merged: method {named[0]} and {named[1]}, or its settings, differ")
    method, schedule = methods[0]
    if schedule != "separate" and not method_config(method).independent_tasks:
        raise BankError(
            f"{both} cannot be merged: with method '{method['name']}' and these settings, what a task learns depends "
            "on the tasks before it; learn the new tasks from one snapshot with bank.start"
        )


def _merged_router(first: RouterState, second: RouterState, ours: Snapshot, theirs: Snapshot) -> RouterState:
    both = _names(ours, theirs)
    settings = [{key: value for key, value in state.settings.items() if key != "tasks"} for state in (first, second)]
    selects = method_config(ours.provenance["config"]["method"]).selects_router
    if (first.kind != second.kind and not selects) or settings[0] != settings[1]:
        raise BankError(
            f"{both} cannot be merged: router '{first.kind}' and router '{second.kind}', or its settings, differ"
        )
    kind = router_class(first)
    tensors: dict[str, Tensor] = dict(first.tensors)
    for name, tensor in second.tensors.items():
        if not torch.equal(tensors.setdefault(name, tensor), tensor):
            owner = kind.task_of(name)
            what = f"task '{owner}' has other keys" if owner else f"the router's '{name}' differs"
            raise BankError(f"{both} cannot be merged: {what}")
    tasks = list(dict.fromkeys([*first.settings.get("tasks", ()), *second.settings.get("tasks", ())]))
    merged: Mapping[str, Any] = {**settings[0], **({"tasks": tasks} if tasks else {})}
    return replace(first, settings=dict(merged), tensors=tensors)


def _dev_queries(bank: Bank, snapshot: Snapshot) -> dict[str, Tensor]:
    """Return task -> queries of its dev texts, of the snapshot's training state."""
    _, groups = get_state(bank, snapshot)
    return {name.removeprefix("dev/"): held["tensor"] for name, held in groups.items() if name.startswith("dev/")}


def _copied(bank: Bank, other: Bank, entry: SnapshotAdapter, with_samples: bool) -> AdapterManifest:
    manifest = other.manifest(entry.ref)
    removed = removed_from(other.storage).samples
    kept = {kind: info for kind, info in entry.extras.items() if with_samples and info.file not in removed}
    extras = {kind: other.get(info, f"{entry} ({kind})") for kind, info in kept.items()}
    source = {"merged_from": f"{other.storage.address} {entry}"}
    return bank.publish(
        entry.name,
        other.fetch(manifest),
        manifest.backbone,
        manifest.tasks,
        manifest.provenance | source,
        extras=extras,
    )


def _config(ours: Snapshot, theirs: Snapshot) -> dict[str, Any]:
    """Return our run's config with their tasks in its stream, so that the merged snapshot can be evaluated."""
    config = dict(ours.provenance["config"])
    specs = [
        list(snapshot.provenance["config"]["stream"]["tasks"] or [task.name for task in snapshot.tasks])
        for snapshot in (ours, theirs)
    ]
    names = [[spec["name"] if isinstance(spec, dict) else spec for spec in snapshot] for snapshot in specs]
    learned = {task.name for task in theirs.tasks}
    new = [spec for spec, name in zip(specs[1], names[1], strict=True) if name in learned and name not in names[0]]
    config["stream"] = {**config["stream"], "tasks": [*specs[0], *new]}
    for index, key in enumerate(LIMITS):
        own = {name: theirs.token_limits(name)[index] for name in names[1] if name in learned - set(names[0])}
        differing = {name: limit for name, limit in own.items() if limit not in (None, config["stream"].get(key))}
        config["stream"][f"{key}_by_task"] = {**config["stream"].get(f"{key}_by_task", {}), **differing}
    formats = recorded_settings(theirs).model_dump(mode="json")["response_format"]
    if joined_formats := {name: given for name, given in formats.items() if name in learned}:
        own_eval = config.get("eval", {})
        config["eval"] = {**own_eval, "response_format": {**joined_formats, **own_eval.get("response_format", {})}}
    config["method"] = copy.deepcopy(config["method"])
    for path, given in method_config(theirs.provenance["config"]["method"]).settings_by_task().items():
        holder, key = at(config["method"], path)
        holder[key] = {**given, **holder.get(key, {})}
    return config


def _names(ours: Snapshot, theirs: Snapshot) -> str:
    return f"snapshots {ours.number} and {theirs.number}"
