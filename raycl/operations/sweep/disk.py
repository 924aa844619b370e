"""Files that can be removed from the disk without losing what was learned.

A bank is never removed, nor anything of a run that is not finished.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from raycl.bank.states import has_state
from raycl.data.sources.cache import cache_folder
from raycl.errors import BankError, RunError, StorageError
from raycl.launch.status import status_of
from raycl.operations.sweep.definition.sweep_folder import SWEEP
from raycl.storage import Storage
from raycl.training.records.checkpoint import FOLDER as CHECKPOINTS
from raycl.training.records.publish import open_bank
from raycl.training.records.run_folder import CONFIG

PREFIXES, BEST = "prefixes", "best.yaml"
DEPTH = 3
"""Folders of runs lie at most this deep: SWEEP/trials/RUN."""


@dataclass(frozen=True)
class Removable:
    """A folder that can be removed.

    Attributes:
        kind: one of `KINDS`. folder: its location. bytes: its size.
    """

    kind: str
    folder: Storage
    bytes: int


def removable(directory: Storage, kinds: Collection[str]) -> list[Removable]:
    """Return what can be removed of these kinds below a folder of runs; `cache` is this machine's.

    Raises:
        StorageError: the folder is out of reach.
    """
    items = []
    for kind in KINDS:
        for folder in KINDS[kind](directory) if kind in kinds else ():
            size = sum(file.size for file in folder.files().values())
            if size:
                items.append(Removable(kind, folder, size))
    return items


def _cache(directory: Storage) -> Iterator[Storage]:
    del directory
    yield Storage.at(cache_folder(None))


def _prefixes(directory: Storage) -> Iterator[Storage]:
    """Return first phases that a sweep's trials had in common, of sweeps that have ended."""
    for folder in _folders(directory, SWEEP):
        if folder.exists(BEST):
            yield folder.sub(PREFIXES)


def _checkpoints(directory: Storage) -> Iterator[Storage]:
    """Yield checkpoints of finished runs whose bank has the state from which a next run starts."""
    for folder in _folders(directory, CONFIG):
        with suppress(RunError, BankError, StorageError):
            if status_of(folder.address).state == "finished" and _can_start_from_bank(folder):
                yield folder.sub(CHECKPOINTS)


def _can_start_from_bank(folder: Storage) -> bool:
    from raycl.launch.prepared_run import run_in

    storage, config, state = run_in(folder.address)
    published = state.phases[-1]["bank"]
    if not published:
        return False
    bank = open_bank(config.bank, storage)
    return has_state(bank, bank.open(published["snapshot"]))


def _folders(directory: Storage, file: str, depth: int = DEPTH) -> Iterator[Storage]:
    """Yield folders that hold the file; nothing is searched inside them but the trials of a sweep."""
    if directory.exists(file):
        yield directory
        return
    for name in directory.list() if depth else ():
        with suppress(StorageError):  # a file, or gone meanwhile
            yield from _folders(directory.sub(name), file, depth - 1)


KINDS: dict[str, Callable[[Storage], Iterator[Storage]]] = {
    "checkpoints": _checkpoints,
    "prefixes": _prefixes,
    "cache": _cache,
}
"""Kind -> where it is found."""

EFFECTS = {
    "checkpoints": "finished runs are extended from their bank (bank.start=BANK@REF) instead of --resume --add",
    "prefixes": "a sweep that is extended trains first phases again",
    "cache": "tables, queries and hashes are computed again when they are needed",
}
"""Kind -> what is different afterwards."""
