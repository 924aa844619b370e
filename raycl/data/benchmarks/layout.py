"""Where the files of a benchmark's tasks lie below a root folder.

Why it exists: two releases share the name `CL_Benchmark` and lay it out differently, and people unpack them at
different depths; a task's folder may be in the root, in `SuperNI` or `Long_Sequence`, or in an O-LoRA group.
What it does not know: what is in the files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raycl.data.benchmarks.knowledge import OLORA_GROUPS, fold, folder_names
from raycl.data.sources.source import SourceFile
from raycl.errors import DataError, MissingTasksError, counted
from raycl.storage import Storage

log = logging.getLogger(__name__)

SPLITS = ("train", "dev", "test")
_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")
_CONTAINERS = frozenset(fold(name) for name in ("CL_Benchmark", "SuperNI", "Long_Sequence", *OLORA_GROUPS))


@dataclass(frozen=True)
class TaskFolder:
    """A task's folder and the split files in it."""

    folder: Storage
    files: Mapping[str, SourceFile]


def check_name(name: str) -> None:
    """Refuse a task name that could lead out of its folder.

    Raises:
        DataError: the name is empty or has a path in it.
    """
    if not name.strip() or "/" in name or "\\" in name or ".." in name:
        raise DataError(
            f"task name '{name}' cannot be used: expected a plain name without '/', '\\' or '..'; "
            "give the place of the files in 'path' or 'root'"
        )


def task_folder(folder: Storage) -> TaskFolder:
    """The split files `{train,dev,test}.*` directly in `folder`."""
    names = _list(folder)
    files = {
        split: SourceFile(folder, f"{split}{suffix}")
        for split in SPLITS
        for suffix in reversed(_SUFFIXES)
        if f"{split}{suffix}" in names
    }
    return TaskFolder(folder, files)


def locate(root: Storage, tasks: Sequence[str], needed: Sequence[str], allow_missing: bool) -> dict[str, TaskFolder]:
    """The folders of `tasks` (canonical names) below `root`, in their order.

    Args:
        needed: splits that each task must have a file for.
        allow_missing: leave missing tasks out with a warning instead of raising.

    Raises:
        MissingTasksError: some tasks lack a folder or a needed file, all named at once; or all are missing.
    """
    for name in tasks:
        check_name(name)
    candidates = _candidates(root)
    found = {name: _best(candidates, name, needed) for name in tasks}
    missing = {name: lack for name, lack in found.items() if isinstance(lack, str)}
    if missing:
        listing = ", ".join(f"{name} ({lack})" for name, lack in missing.items())
        if not allow_missing or len(missing) == len(tasks):
            raise MissingTasksError(
                f"{len(missing)} of {len(tasks)} tasks are missing under '{root.uri}': {listing}; expected "
                "<task>/{train,test}.json there, in CL_Benchmark, SuperNI, Long_Sequence or an O-LoRA group folder; "
                "check 'root' or set 'allow_missing: true' to continue without them"
            )
        log.warning("continuing without %s missing under '%s': %s", counted(len(missing), "task"), root.uri, listing)
    return {name: place for name, place in found.items() if isinstance(place, TaskFolder)}


def _best(candidates: Mapping[str, list[Storage]], name: str, needed: Sequence[str]) -> TaskFolder | str:
    """The first candidate folder with all needed files, or what is lacking."""
    lack = "no folder"
    for folded in sorted(folder_names(name), key=lambda other: other != fold(name)):
        for folder in candidates.get(folded, []):
            place = task_folder(folder)
            absent = [split for split in needed if split not in place.files]
            if not absent:
                return place
            if place.files:
                lack = f"no {' and no '.join(absent)} file"
    return lack


def _candidates(root: Storage) -> dict[str, list[Storage]]:
    """Folded name -> folders of that name, nearest to the root first."""
    result: dict[str, list[Storage]] = {}
    for folder, name in _walk(root, depth=2):
        result.setdefault(fold(name), []).append(folder.sub(name))
    return result


def _walk(folder: Storage, depth: int) -> Iterator[tuple[Storage, str]]:
    names = _list(folder)
    yield from ((folder, name) for name in names)
    if depth:
        for name in names:
            if fold(name) in _CONTAINERS:
                yield from _walk(folder.sub(name), depth - 1)


def _list(folder: Storage) -> list[str]:
    try:
        return folder.list()
    except OSError as error:
        raise DataError(f"cannot list '{folder.uri}': {error}") from error
