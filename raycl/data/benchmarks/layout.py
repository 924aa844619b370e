"""The locations of a benchmark's files below a root folder.

Two releases share the name `CL_Benchmark` and lay it out differently, and people unpack them at different depths; a
task's folder may be in the root, in `SuperNI` or `Long_Sequence`, or in an O-LoRA group. Other tasks come as one file,
or with a folder of CSV files for each split (MMLU).
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from raycl.config.names import REFERENCE_SIGNS, problem_of, shown
from raycl.data.benchmarks.knowledge import OLORA_GROUPS, fold
from raycl.data.sources.slices import NAMES
from raycl.data.sources.source import SourceFile, SourceFiles
from raycl.errors import DataError, MissingTasksError, counted
from raycl.storage import Storage

log: logging.Logger = logging.getLogger(__name__)

LABELS_FILE = "labels.json"
SPLITS = ("train", "dev", "test")
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")
_SPLIT_FOLDERS = {"train": ("train", "auxiliary_train"), "dev": NAMES["dev"], "test": ("test",)}
_CONTAINERS = frozenset(
    fold(name) for name in ("CL_Benchmark", "SuperNI", "Long_Sequence", "TRACE-Benchmark", *OLORA_GROUPS)
)

_USUAL = "CL_Benchmark, SuperNI, Long_Sequence or an O-LoRA group folder"


@dataclass(frozen=True)
class TaskFolder:
    """A task's folder and the split files in it."""

    folder: Storage
    files: Mapping[str, SourceFile | SourceFiles]


def check_name(name: str) -> None:
    """Refuse a task name that cannot be a file's and an adapter's, in any script.

    Raises:
        DataError: the name is empty, too long, or has a path or signs in it that adapters' names cannot have.
    """
    if problem := problem_of(name, REFERENCE_SIGNS):
        raise DataError(
            f"task name {shown(name)} cannot be used, {problem}; give the place of the files in 'path' or 'root'"
        )


def task_folder(folder: Storage, one_file: bool = False, format: str = "auto") -> TaskFolder:
    """Return the split files `{train,dev,test}.*` directly in `folder`, else folders of CSV files for each split.

    A split may have any of its names (`raycl.data.sources.slices.NAMES`); its usual one comes first.

    Args:
        one_file: a single data file is train. format: format of the files, whose suffix may also be its name.
    """
    names, suffixes = _list(folder), (*SUFFIXES, f".{format}")
    files: dict[str, SourceFile | SourceFiles] = {
        split: SourceFile(folder, f"{name}{suffix}")
        for split in SPLITS
        for name in reversed(NAMES[split])
        for suffix in reversed(suffixes)
        if f"{name}{suffix}" in names
    }
    files = files or _split_folders(folder, names)
    data = [name for name in names if name.endswith(suffixes) and name != LABELS_FILE]
    if one_file and not files and len(data) == 1:
        files["train"] = SourceFile(folder, data[0])
    return TaskFolder(folder, files)


def _split_folders(folder: Storage, names: Sequence[str]) -> dict[str, SourceFile | SourceFiles]:
    """Return the CSV files in each split's folder, sorted by name; MMLU is published as a file for each subject."""
    by_split: dict[str, SourceFile | SourceFiles] = {}
    for split, candidates in _SPLIT_FOLDERS.items():
        for name in (name for name in candidates if name in names and split not in by_split):
            inside = folder.sub(name)
            files = tuple(
                SourceFile(inside, file_name) for file_name in sorted(_list(inside)) if file_name.endswith(".csv")
            )
            if files:
                by_split[split] = SourceFiles(inside, files)
    return by_split


def locate(
    root: Storage,
    tasks: Mapping[str, Collection[str]],
    needed: Sequence[str],
    allow_missing: bool,
    one_file: bool = False,
    release: str = "",
) -> dict[str, TaskFolder]:
    """Return the folders of `tasks` below `root`, in their order.

    Args:
        tasks: canonical name -> folded names that its folder may have.
        needed: splits that each task must have a file for.
        one_file: a task may be a single file, in its folder or by its name.
        allow_missing: leave missing tasks out with a warning instead of raising.
        release: name of a further folder that may hold them; "": none.

    Raises:
        MissingTasksError: some tasks lack a folder or a needed file, all named at once; or all are missing.
    """
    for name in tasks:
        check_name(name)
    candidates = _candidates(root, _CONTAINERS | {fold(release)})
    folders = {name: _best(candidates, name, names, needed, one_file) for name, names in tasks.items()}
    missing = {name: lack for name, lack in folders.items() if isinstance(lack, str)}
    if missing:
        listing = ", ".join(f"{name} ({lack})" for name, lack in missing.items())
        if not allow_missing or len(missing) == len(tasks):
            raise MissingTasksError(
                f"{len(missing)} of {len(tasks)} tasks are missing under '{root.uri}': {listing}; expected "
                f"<task>/{{train,test}}.json there, in {release or _USUAL}; "
                "check 'root' or set 'allow_missing: true' to continue without them"
            )
        log.warning("continuing without %s missing under '%s': %s", counted(len(missing), "task"), root.uri, listing)
    return {name: folder for name, folder in folders.items() if isinstance(folder, TaskFolder)}


def _best(
    candidates: Mapping[str, list[Storage]], name: str, folders: Collection[str], needed: Sequence[str], one_file: bool
) -> TaskFolder | str:
    """Return the first candidate folder with all needed files, or what is lacking."""
    lack = "no folder"
    for folded in sorted(folders, key=lambda other: other != fold(name)):
        for folder in candidates.get(folded, []):
            if folder.root.endswith(SUFFIXES):
                file = SourceFile.at(folder.address)
                if one_file:
                    return TaskFolder(file.folder, {"train": file})
                lack = "one file, from which stream.test_fraction takes test rows"
                continue
            task_files = task_folder(folder, one_file)
            absent = [split for split in needed if split not in task_files.files]
            if not absent:
                return task_files
            if task_files.files:
                lack = f"no {' and no '.join(absent)} file"
    return lack


def _candidates(root: Storage, containers: Collection[str]) -> dict[str, list[Storage]]:
    """Return the folders of each folded name, nearest to the root first.

    Args:
        containers: folded names of folders that are searched too.
    """
    result: dict[str, list[Storage]] = {}
    for folder, name in _walk(root, 2, containers):
        stem = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
        result.setdefault(fold(stem), []).append(folder.sub(name))
    return result


def _walk(folder: Storage, depth: int, containers: Collection[str]) -> Iterator[tuple[Storage, str]]:
    names = _list(folder)
    yield from ((folder, name) for name in names)
    if depth:
        for name in names:
            if fold(name) in containers:
                yield from _walk(folder.sub(name), depth - 1, containers)


def _list(folder: Storage) -> list[str]:
    try:
        return folder.list()
    except OSError as error:
        raise DataError(f"cannot list '{folder.uri}': {error}") from error
