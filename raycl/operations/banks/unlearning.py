"""Unlearning: a new snapshot without a task, and what that cost every other one.

Old snapshots stay until they are pruned; with the last one that names them, the task's tensors go too.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raycl import config as configs
from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.states import get_router, get_state, put_router, put_state
from raycl.bank.tensor_groups import TensorGroups
from raycl.config.trust import NONE_GIVEN, Permissions
from raycl.data.stream import StreamConfig, open_stream
from raycl.errors import BankError
from raycl.methods.registry import method_class
from raycl.metrics.settings import EvalConfig
from raycl.routing.routers import without
from raycl.serve.offline.evaluation import score_snapshot
from raycl.serve.offline.model import OfflineModel, settings_here
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import recorded_data
from raycl.training.records.bank_start import PARAMETERS, adapters_of_task, without_task
from raycl.training.setup.snapshot_start import settings_by_task
from raycl.types import Score

log: logging.Logger = logging.getLogger("raycl")


@dataclass(frozen=True)
class UnlearningResult:
    """The result of unlearning a task.

    Attributes:
        removed: adapters that the new snapshot does not name.
        before, after: score of every other task; empty without `scores`.
    """

    task: str
    old: int
    new: int
    removed: list[str]
    before: dict[str, Score] = field(default_factory=dict)
    after: dict[str, Score] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedSources:
    """The present locations of a snapshot's data and backbone, and the permissions of its author.

    Attributes:
        overrides: dotted settings of the stream, for data that has moved (`stream.root=...`, `stream.test_rows=200`).
        backbone: present location of the backbone, if it has moved.
        permissions: code that the snapshot's author may run here.
        storage: addresses of storage, other than the bank's, at which the snapshot's record may name data.
    """

    overrides: Sequence[str] = ()
    backbone: str = ""
    permissions: Permissions = NONE_GIVEN
    storage: Sequence[str] = ()


AS_RECORDED = RecordedSources()


def forget(
    bank: Bank, snapshot: Snapshot, task: str, scores: bool = True, sources: RecordedSources = AS_RECORDED
) -> UnlearningResult:
    """Make a snapshot without `task`: its adapters, their head rows, keys and pseudo samples are gone from it.

    Args:
        scores: also evaluate every other task before and after.
        sources: present locations of data and backbone.

    Raises:
        BankError: the task is unknown or the only one, or shares an adapter with others.
        RayclError: backbone or data cannot be read; then nothing is changed.
    """
    removed = adapters_of_task(snapshot, task)
    if len(snapshot.tasks) == 1:
        raise BankError(f"'{task}' is the only task of snapshot {snapshot.number}: remove the bank instead")
    before = evaluate(bank, snapshot, task, sources) if scores else {}
    kept = [(entry, snapshot.layouts[entry.layout]) for entry in snapshot.adapters if entry.name not in removed]
    forgotten = [*snapshot.provenance.get("forgotten", []), task]
    router, _ = put_router(bank, without(get_router(bank, snapshot), task))
    new = bank.snapshot(
        NewSnapshot(
            kept,
            snapshot.backbone,
            router,
            [info for info in snapshot.tasks if info.name != task],
            snapshot.encoder,
            parent=snapshot.number,
            provenance={**snapshot.provenance, "forgotten": forgotten, "config": _config_without(snapshot, task)},
            training=_training_without(bank, snapshot, task, removed),
        )
    )
    now = bank.open(new.number)
    after = evaluate(bank, now, task, sources) if scores else {}
    return UnlearningResult(task, snapshot.number, new.number, removed, before, after)


def _training_without(bank: Bank, snapshot: Snapshot, task: str, adapters: Sequence[str]) -> str | None:
    """Return the training state without the task; None: the snapshot has none, or its method cannot take a task out."""
    config = snapshot.provenance.get("config", {})
    if snapshot.training is None or not config:
        return None
    method = method_class(config["method"]["name"])
    if method.without_task is None:
        return None
    values, groups = get_state(bank, snapshot)
    parameters = {PARAMETERS: held} if (held := groups.pop(PARAMETERS, None)) else {}
    values, frozen = without_task(values, TensorGroups(groups), method, task, adapters)
    return put_state(bank, values, {**parameters, **frozen.groups})


def _config_without(snapshot: Snapshot, task: str) -> dict[str, Any]:
    """Return the run's config without the task in its stream, from which a run can start."""
    config: dict[str, Any] = copy.deepcopy(snapshot.provenance.get("config", {}))
    if config:
        specs = config["stream"]["tasks"] or [info.name for info in snapshot.tasks]
        names = [spec["name"] if isinstance(spec, dict) else spec for spec in specs]
        left = [spec for spec, name in zip(specs, names, strict=True) if name != task]
        config["stream"] = {**config["stream"], "tasks": left}
        for holder, key in settings_by_task(config):
            holder[key].pop(task, None)
    return config


def evaluate(
    bank: Bank, snapshot: Snapshot, without: str = "", sources: RecordedSources = AS_RECORDED
) -> dict[str, Score]:
    """Return the score of every task of the snapshot but one, on the data of the run that made it.

    Raises:
        BankError: the snapshot was not made by a run. ConfigError: it names storage that the caller does not.
        RayclError: backbone or data cannot be read.
    """
    tree, seed = recorded_data(
        snapshot, bank.storage.address, sources.overrides, sources.storage, "--allow-storage ADDRESS"
    )
    stream = open_stream(configs.validate(StreamConfig, tree["stream"]), seed)
    wanted = {task.name for task in stream.tasks if stream.has_data(task)} & {info.name for info in snapshot.tasks}
    wanted -= {without}
    log.info("snapshot %d:", snapshot.number)
    settings = configs.validate(EvalConfig, tree["eval"])
    given = {"backbone": sources.backbone or None, "max_batch": settings.batch_size, **asdict(sources.permissions)}
    with OfflineModel.open(bank, snapshot, ServeConfig(**settings_here(bank), **given)) as model:
        return score_snapshot(model, stream, [task for task in stream.tasks if task.name in wanted], settings)
