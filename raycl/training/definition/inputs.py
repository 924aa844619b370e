"""Inputs of a run's numbers in addition to its config: data, pretrained models, and libraries.

A run records the fingerprints of data and models with its first claim, and the versions of libraries with each. What
continues it (a later attempt, added tasks, a run that starts from its snapshots, a merge) is compared with them.
"""

import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

from raycl.plugins import Used

Inputs = dict[str, Any]
"""`models`: setting -> name, and SHA-256 of each part; `tasks`: name -> split -> `rows` (their number), `where` they
are from, `sha256`; `files`: setting and file -> `path`, `sha256`."""

COMPUTE = (
    *("raycl", "torch", "transformers", "tokenizers", "numpy", "peft"),
    *("deepspeed", "bitsandbytes", "sentence-transformers"),
)
"""Packages whose versions can change a number."""

OTHERS = ("ray", "pyarrow")

DIGITS = 12
"""Digits of a hash in messages."""


def changes(before: Inputs, now: Inputs, without: Collection[str] = ()) -> list[str]:
    """Return what differs, a clause each that says what and where; what only one of the two knows is not compared.

    Args:
        without: tasks that may differ.
    """
    return [*_models(before, now), *_rows(before, now, without), *_files(before, now)]


def joined(before: Inputs, now: Inputs) -> Inputs:
    """Return the inputs of both; those of `now` replace those of `before`."""
    return {key: {**before.get(key, {}), **now.get(key, {})} for key in {**before, **now}}


def of_tasks(inputs: Inputs, names: Collection[str]) -> Inputs:
    """Return the inputs without the rows of all other tasks."""
    return {**inputs, "tasks": {name: rows for name, rows in inputs.get("tasks", {}).items() if name in names}}


def _models(before: Inputs, now: Inputs) -> Iterator[str]:
    for setting, old, new in _shared(before, now, "models"):
        differing = [part for part in old if part != "name" and old[part] != new.get(part)]
        if differing:
            parts = " and ".join(f"{part} ({_hashes(old[part], new.get(part, ''))})" for part in differing)
            yield f"{setting} '{new['name']}' has other {parts}"


def _rows(before: Inputs, now: Inputs, without: Collection[str]) -> Iterator[str]:
    for task, old, new in _shared(before, now, "tasks"):
        for split in dict.fromkeys([*old, *new]) if task not in without else ():
            earlier, two = (rows.get(split, {"rows": 0, "sha256": "", "where": "none"}) for rows in (old, new))
            if earlier["sha256"] != two["sha256"]:
                counts = f"{earlier['rows']:,} then, {two['rows']:,} now; {_hashes(earlier['sha256'], two['sha256'])}"
                yield f"task '{task}' has other {split} rows in '{two['where']}' ({counts})"


def _files(before: Inputs, now: Inputs) -> Iterator[str]:
    for setting, old, new in _shared(before, now, "files"):
        if old["sha256"] != new["sha256"]:
            what = setting.partition("/")[0]
            yield f"{what} has another file '{new['path']}' ({_hashes(old['sha256'], new['sha256'])})"


def _shared(before: Inputs, now: Inputs, kind: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    theirs = now.get(kind, {})
    yield from ((name, old, theirs[name]) for name, old in before.get(kind, {}).items() if name in theirs)


def _hashes(old: str, new: str) -> str:
    return f"SHA-256 {old[:DIGITS] or 'none'} then, {new[:DIGITS] or 'none'} now"


def versions(plugins: Used) -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a run uses.

    Args:
        plugins: parts that it uses of other packages: `method my-method` -> `my-package 1.0`.
    """
    installed = {package: _version(package) for package in (*COMPUTE, *OTHERS)}
    return (
        {"python": platform.python_version()}
        | {name: version for name, version in installed.items() if version}
        | plugins
    )


def version_changes(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each attempt that computes with other libraries than the last known one before it."""
    worked = [attempt for attempt in attempts if "ended" in attempt or attempt is attempts[-1]]
    known = [(attempt["attempt"], attempt["versions"]) for attempt in worked if attempt.get("versions")]
    changes = []
    for (_, old), (number, new) in pairwise(known):
        if differing := different_versions(old, new):
            changes.append(f"attempt {number} computes with other libraries than the one before it: {differing}")
    return changes


def different_versions(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return a text such as `torch 2.9.0, before 2.8.0`; "": none differs."""
    plugins = [name for name in {**old, **new} if " " in name]
    pairs = {name: (old.get(name, "none"), new.get(name, "none")) for name in (*COMPUTE, *plugins)}
    return ", ".join(f"{name} {now}, before {before}" for name, (before, now) in pairs.items() if before != now)


@cache
def _version(package: str) -> str | None:
    """Return the version of an installed package, looked up once, since that takes 2 ms."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
