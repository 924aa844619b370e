"""The config of a run that starts from a snapshot of a bank (`bank.start`): the snapshot's own, with more tasks."""

import copy
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycl import config as configs
from raycl.bank import Bank, Snapshot
from raycl.bank.states import state_objects
from raycl.config import Tree
from raycl.config.trust import addresses, require_named
from raycl.data.resolve import missing_files
from raycl.data.settings import RecordedTask, StreamConfig
from raycl.errors import BankError, ConfigError
from raycl.methods.base import at
from raycl.methods.registry import method_class, method_config
from raycl.training.definition.settings import EXEMPT
from raycl.training.records.bank_start import adapters_of_task
from raycl.training.records.hub import HubAddress, on_hub, pull
from raycl.training.records.named_bank import snapshot_at

log: logging.Logger = logging.getLogger("raycl")

OWN = ("launch", "tracking", "output", "bank")
"""Sections that say where and how a run runs: they are never taken over from the snapshot's run."""

LIMITS = ("max_source_tokens", "max_target_tokens")
"""Settings of the stream that are a task's own, as it was learned."""

OF_TASK = {"stream": (*LIMITS, "train_rows"), "train": ("epochs", "learning_rate")}
"""Settings of a section that `KEY_by_task` gives by the names of tasks."""

BY_LEARNED_TASK = ("train.epochs_by_task", "train.learning_rate_by_task", "stream.train_rows_by_task")
BY_TASK = ("stream.metric_by_task", *(f"stream.{name}_by_task" for name in LIMITS), "eval.response_format")
"""Settings by the names of tasks, beside those of methods: of learned tasks alone, and of evaluated ones too."""

STARTS = ("start", "revise", "revise_from")
"""Settings of the bank that say how such a run starts."""

MAY_DIFFER = ("train", "engine", "checkpoint", "stream.root", "stream.cache_dir")
"""Settings that act only on the tasks that are learned next, or name locations of data."""


@dataclass(frozen=True)
class Start:
    """A run that starts from a snapshot.

    Attributes:
        tree: its whole config. base: config of the snapshot's run. added: names of the new tasks.
        written: `bank.start` as it was given.
    """

    tree: Tree
    base: Tree
    added: tuple[str, ...]
    written: str


def read_start(given: Tree, runs: str) -> Start | None:
    """Return the run that starts from a snapshot, from what the user wrote; None without `bank.start`.

    Args:
        runs: folder of runs: a bank on the hub is pulled into `hub/` there, unless `bank.dir` names another folder.

    Raises:
        BankError: there is no such snapshot, or it cannot be trained on.
        ConfigError: no new tasks, another bank to publish to, or storage that the snapshot names and the user does not.
    """
    section = given.get("bank")
    written = section.get("start") if isinstance(section, dict) else None
    if not written:
        return None
    assert isinstance(section, dict)
    bank, snapshot = _pulled(str(written), section.get("dir"), runs) if on_hub(str(written)) else snapshot_at(written)
    address = bank.storage.address
    if section.get("dir") and Bank.at(str(section["dir"])).storage.address != address:
        raise ConfigError(
            f"bank.dir is '{section['dir']}', but the run starts from a snapshot of '{bank.storage.uri}': its "
            "snapshots are published there as children of that one; leave bank.dir out"
        )
    base: Tree | None = copy.deepcopy(snapshot.provenance.get("config"))
    if base is None:
        raise BankError(
            f"snapshot {snapshot.number} of '{bank.storage.uri}' was not published by a run: none can start from it"
        )
    state_objects(bank, snapshot)
    if snapshot.training is None:
        raise BankError(
            f"snapshot {snapshot.number} of '{bank.storage.uri}' has no training state: expected one that a run has "
            "published, such as an earlier one (`raycl bank log`); bank.branch=NAME publishes onto another branch"
        )
    learned = [task.name for task in snapshot.tasks]
    specs = (base["stream"]["tasks"] or learned)[: len(learned)]
    stream = given.get("stream") if isinstance(given.get("stream"), dict) else {}
    assert isinstance(stream, dict)
    revised = section.get("revise")
    if revised:
        added = _revised(str(revised), stream.get("tasks"), dict(zip(learned, specs, strict=True)), snapshot)
        specs = [spec for name, spec in zip(learned, specs, strict=True) if name != revised]
    else:
        added = _added(stream.get("tasks"), learned, snapshot, str(written))
    names = [*learned, *map(name_of, added)]
    for holder, key in settings_by_task(base):
        holder[key] = {name: value for name, value in holder[key].items() if name in names}
    for key in LIMITS:
        if revised and base["stream"].get(key) == "auto":  # its new data has lengths of its own
            base["stream"][f"{key}_by_task"].pop(str(revised), None)
    if list(map(name_of, stream.get("tasks") or ()))[: len(learned)] == learned:  # with data that the user gives anew
        pairs = zip(specs, stream["tasks"], strict=False)
        specs = [new if isinstance(new, dict) else old for old, new in pairs]
    base["stream"]["cache_dir"] = None
    tree = _merged({key: value for key, value in base.items() if key not in OWN}, given)
    known = [address, *addresses(given).values()]
    named = {**tree, "bank": None, "stream": {**tree["stream"], "tasks": [*specs, *added]}}
    require_named(named, known, f"snapshot {snapshot.number} of '{bank.storage.uri}'", "bank.allow_storage=[ADDRESS]")
    keep_for_others("stream", base["stream"], tree["stream"], list(map(name_of, added)))
    tree["stream"]["tasks"] = [*_reachable(specs, snapshot, tree), *added]
    tree["bank"] = {**section, "dir": address, "start": f"{address}@{snapshot.sha256}"}
    return Start(tree, base, tuple(map(name_of, added)), str(written))


def _pulled(written: str, folder: Any, runs: str) -> tuple[Bank, Snapshot]:
    address = HubAddress.of(written)
    return pull(address, lambda _: Bank.at(folder or f"{runs}/hub/{address.repository}"))[:2]


def _reachable(specs: Sequence[Any], snapshot: Snapshot, tree: Tree) -> list[Any]:
    """Return the learned tasks; one whose files are not there any more gets what the snapshot records of it."""
    recorded = {info.name: info for info in snapshot.tasks}
    reachable = []
    for spec in map(_original, specs):
        alone = {**tree["stream"], "tasks": [spec], "unseen": None}
        info = recorded.get(name_of(spec))
        if info is not None and (why := missing_files(configs.validate(StreamConfig, alone))):
            log.warning("learned task '%s' is not evaluated, since its data is missing: %s", info.name, why)
            known = info.model_dump(include=set(RecordedTask.model_fields))
            spec = {**(spec if isinstance(spec, dict) else {"name": info.name}), "recorded": known}
        reachable.append(spec)
    return reachable


def _original(spec: Any) -> Any:
    """Return a task's spec before `_reachable` added to it: its data may be back."""
    if not isinstance(spec, dict) or not spec.get("recorded"):
        return spec
    left = {key: value for key, value in spec.items() if key != "recorded"}
    return left if any(left.get(key) for key in ("path", "train")) else left["name"]


def _added(tasks: Any, learned: Sequence[str], snapshot: Snapshot, written: str) -> list[Any]:
    """Return tasks that the snapshot has not learned; a list that begins with the learned ones is taken without."""
    names = list(map(name_of, tasks or ()))
    if names[: len(learned)] == list(learned):
        tasks, names = tasks[len(learned) :], names[len(learned) :]
    if any(isinstance(task, dict) and task.get("recorded") for task in tasks or ()):
        raise ConfigError("stream.tasks has `recorded` for a new task: give the task's data instead")
    if again := [name for name in names if name in learned]:
        raise ConfigError(
            f"stream.tasks names {', '.join(again)}, which snapshot {snapshot.number} has learned already: "
            "expected new tasks only"
        )
    if not names:
        raise ConfigError(
            f"bank.start={written} without new tasks: name those that are learned next in stream.tasks (snapshot "
            f"{snapshot.number} has learned {', '.join(learned)})"
        )
    return list(tasks)


def _revised(task: str, given: Any, specs: Mapping[str, Any], snapshot: Snapshot) -> list[Any]:
    """Return the task that is learned again, as the user gives it; else as it was."""
    if task not in specs:
        raise ConfigError(
            f"bank.revise={task}, but snapshot {snapshot.number} has not learned it: expected one of {', '.join(specs)}"
        )
    if len(specs) == 1:
        raise ConfigError(f"bank.revise={task}, but it is the only task that was learned: start a new run instead")
    others = [name for name in specs if name != task]
    if list(map(name_of, given or ())) == [*others, task]:
        given = given[-1:]  # the resolved config of such a run
    if given and [name_of(spec) for spec in given] != [task]:
        raise ConfigError(
            f"bank.revise={task} learns that task alone, but stream.tasks names {', '.join(map(name_of, given))}: name "
            f"'{task}' there with its new data, or leave stream.tasks out"
        )
    adapters_of_task(snapshot, task)
    if not method_class(_method_of(snapshot)).revisable:
        raise ConfigError(
            f"bank.revise={task}: method '{_method_of(snapshot)}' cannot learn a task again, since what it keeps of "
            "all tasks holds that task too: start a new run instead"
        )
    return list(given or [_original(specs[task])])


def settings_by_task(tree: Tree) -> Iterator[tuple[Tree, str]]:
    """Yield the sections of a run's resolved config with settings by the names of tasks, and the keys of these."""
    own = (f"method.{path}" for path in method_config(tree["method"]).settings_by_task())
    for holder, key in (at(tree, path) for path in (*BY_LEARNED_TASK, *BY_TASK, *own)):
        if key in holder:  # not in configs of earlier versions
            yield holder, key


def _method_of(snapshot: Snapshot) -> str:
    return str(snapshot.provenance["config"]["method"]["name"])


def name_of(task: Any) -> str:
    """Return the name of a task of `stream.tasks`; of one without a name, its path."""
    return str(task.get("name", task.get("path", "")) if isinstance(task, dict) else task)


def _merged(base: Any, given: Any) -> Any:
    """Return what is given over what is there; a choice by its name alone keeps the settings of that choice."""
    if isinstance(base, dict) and isinstance(given, dict):
        return {**base, **{key: _merged(base.get(key), value) for key, value in given.items()}}
    if isinstance(base, dict) and base.get("name") == given:
        return base
    if isinstance(base, dict) and isinstance(given, list) and sorted(map(str, given)) == sorted(base):
        return base
    return given


def keep_for_others(section: str, before: Tree, after: Tree, fresh: Collection[str]) -> None:
    """Settings of `OF_TASK` that were changed are those of `fresh` tasks alone: other tasks keep theirs.

    Args:
        section: a key of `OF_TASK`.
        before, after: the section; the second is changed.
    """
    for key in OF_TASK[section]:
        if after.get(key) in (before.get(key), None):
            continue
        by_task = f"{key}_by_task"
        recorded, given = before.get(by_task, {}), after.get(by_task, {})
        named = {name: value for name, value in given.items() if name not in fresh or recorded.get(name) != value}
        after[by_task] = {**dict.fromkeys(fresh, after[key]), **named}
        after[key] = before[key]


def recall_lengths(before: Tree, after: Tree) -> None:
    """Lengths that are `auto` are those that a run has recorded.

    Args:
        before, after: the section `stream`; the second is changed.
    """
    for key in LIMITS:
        if after[key] == before[key] == "auto":
            after[f"{key}_by_task"] = {**before[f"{key}_by_task"], **after[f"{key}_by_task"]}


def refuse_changes(start: Start, before: Tree, after: Tree) -> None:
    """Refuse changes of settings that shape what was learned, for a run that starts from a snapshot.

    Args:
        before, after: resolved configs of the snapshot's run and of the one that starts.

    Raises:
        ConfigError: a setting differs.
    """
    changed = changes_beside_tasks(
        before, after, start.added, (*EXEMPT, *MAY_DIFFER, *(f"bank.{name}" for name in STARTS))
    )
    if changed:
        listed = "; ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
        raise ConfigError(
            f"bank.start={start.written} continues a run whose settings differ: {listed}; leave them out, or start a "
            "new run"
        )


def changes_beside_tasks(
    before: Tree, after: Tree, fresh: Collection[str], without: Sequence[str] = EXEMPT
) -> dict[str, tuple[Any, Any]]:
    """Return what differs besides the stream's tasks, and settings of `fresh` ones alone; dotted key -> (old, new)."""
    after = copy.deepcopy(after)
    before = copy.deepcopy(before)
    for tree in (before, after):
        for holder, key in settings_by_task(tree):
            holder[key] = {name: value for name, value in holder[key].items() if name not in fresh}
    after["stream"]["tasks"] = before["stream"]["tasks"]
    return configs.differences(before, after, without=without)
