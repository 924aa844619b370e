"""Banks on the Hugging Face hub: a snapshot of one is pulled into a bank on storage.

    README.md                                     the model card
    <task>/adapter_model.safetensors, ...         a task's adapters in PEFT's layout, which plain PEFT loads
    raycl/hub.json                                the snapshot, its branch, folders of adapters, what was left out
    raycl/snapshots/, adapters/, states/          the bank's records, without folders of the machine that pushed
    raycl/objects/                                tensors that PEFT's layout cannot hold: prompts, bottlenecks, routers

An object that is in PEFT's layout is put together from there, and its hash is that of the bank that was pushed. Only
files that a record names are fetched, JSON and safetensors alone: a repository's code and pickles stay where they are.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from raycl.adapters.peft import names_in_bank
from raycl.backbone.model_files import download
from raycl.bank import Bank, Snapshot
from raycl.bank.branches import MAIN, Branch, BranchName, is_ancestor
from raycl.bank.manifest import (
    AdapterManifest,
    Name,
    ObjectInfo,
    Sha256,
    adapter_of,
    check_name,
    dump,
    manifest_file,
    parse_manifest,
    parse_snapshot,
    snapshot_file,
)
from raycl.bank.pruning import record_removal, removed_from
from raycl.bank.states import ENCODER, state_file, state_objects
from raycl.bank.tensors import HEAD_BIAS, HEAD_WEIGHT, views
from raycl.config.trust import TEXTS
from raycl.data.sources.cache import cache_folder
from raycl.errors import AlreadyExistsError, BankError, StorageError, counted
from raycl.progress import counted_off
from raycl.storage import Storage
from raycl.storage.records import MAX_BYTES, read_fields

log: logging.Logger = logging.getLogger("raycl")

HUB = "hf://"
FORMAT = 1
ROOT = "raycl"
"""Folder of the bank in a repository."""
RECORD = "hub.json"
TENSORS, HEAD = "adapter_model.safetensors", "label_head.safetensors"
"""Files of an adapter's folder that hold tensors: the LoRA under PEFT's names, and a label head."""

SQLITE = re.compile(r"(?P<start>sql:sqlite:///)(?P<path>/.*?)(?P<split>( split '.*)?)", re.DOTALL)
"""A database in a file of this machine, and what a record names of it."""

ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)((?:/[^/@]+)*)(?:@(.+))?")


@dataclass(frozen=True)
class HubAddress:
    """A place on the hub: `hf://ORG/NAME[/FOLDER][@REVISION]`.

    Attributes:
        repository: `ORG/NAME`. folder: a folder in it; "": all of it.
        revision: commit, branch or tag; None: the newest commit.
    """

    repository: str
    folder: str = ""
    revision: str | None = None

    @staticmethod
    def of(text: str) -> HubAddress:
        """Parse an address.

        Raises:
            BankError: it is none.
        """
        match = ADDRESS.fullmatch(text)
        if match is None or ".." in text:
            raise BankError(f"'{text}' names nothing on the hub: expected hf://ORG/NAME or hf://ORG/NAME@REVISION")
        return HubAddress(match[1], match[2].strip("/"), match[3])

    def __str__(self) -> str:
        place = "/".join(filter(None, (self.repository, self.folder)))
        return f"{HUB}{place}{f'@{self.revision}' if self.revision else ''}"

    def fetch(self, files: Sequence[str]) -> Path:
        """Return the repository's folder on this machine, named after its commit, with its files of these names.

        Raises:
            BankError: there is no such repository or revision, or the hub does not answer.
        """
        try:
            return download(self.repository, self.revision, files)
        except (OSError, ValueError) as error:
            raise BankError(
                f"cannot pull {self}: {cause_of(error)}; expected a repository that `raycl push` "
                "wrote; of a private one, log in with `hf auth login`; what has come stays: try again"
            ) from error


def cause_of(error: BaseException) -> str:
    """Return what an error of `huggingface_hub` says, on one line."""
    return " ".join(str(error).split()).partition(" For more information")[0][:300]


def on_hub(address: str) -> bool:
    return address.startswith(HUB)


@dataclass(frozen=True)
class HubRecord:
    """The record of a pushed snapshot.

    Attributes:
        number, sha256: of the snapshot. branch: branch that points at it.
        ancestors: number -> SHA-256 of the snapshots that it descends from, which are not pushed.
        peft: adapter -> its folder, of adapters that are in PEFT's layout bit for bit.
        folders: all folders in PEFT's layout, which the next push replaces.
        without: files of stored samples that were left out.
    """

    number: int
    sha256: str
    branch: BranchName = MAIN
    ancestors: dict[int, Sha256] = field(default_factory=dict)
    peft: dict[Name, Name] = field(default_factory=dict)
    folders: tuple[Name, ...] = ()
    without: tuple[str, ...] = ()


def objects_to_pull(bank: Bank, snapshot: Snapshot, without: Sequence[str]) -> dict[str, ObjectInfo]:
    """Return file -> object of all that answering and training from a snapshot need, except files of samples.

    Raises:
        BankError: the record of its training state is missing or damaged.
    """
    infos = [info for entry in snapshot.adapters for info in (entry.tensors, *entry.extras.values())]
    infos += [snapshot.router.tensors] if snapshot.router.tensors else []
    infos += state_objects(bank, snapshot).values()
    return {info.file: info for info in infos if info.file not in without}


def records_of(snapshot: Snapshot) -> list[str]:
    """Return the files of a bank that describe a snapshot; its own is the last."""
    states = [state_file(snapshot.training)] if snapshot.training is not None else []
    manifests = [manifest_file(entry.name, entry.version) for entry in snapshot.adapters]
    return [*states, *manifests, snapshot_file(snapshot.number)]


def shared(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot as others get it: of folders and files of this machine only the last part, `./tickets`.

    Equal snapshots become equal ones, and one that was shared stays as it is.
    """
    return parse_snapshot(shared_record(snapshot.file, dump(snapshot)), snapshot.file)


def shared_record(file: str, data: bytes) -> bytes:
    """Return the file of a snapshot or a manifest in the same way; of another record the same bytes."""
    record: AdapterManifest | Snapshot
    if file.startswith("snapshots/"):
        record = parse_snapshot(data, file)
    elif adapter_of(file):
        record = parse_manifest(data, file)
    else:
        return data
    tree = record.model_dump(mode="json")
    for name in ("backbone", "encoder", "provenance"):
        tree[name] = _without_folders(tree.get(name))
    if encoder := tree.get("router", {}).get("settings", {}).get(ENCODER):
        tree["router"]["settings"][ENCODER] = _without_folders(encoder)
    return dump(
        type(record).model_validate({key: value for key, value in tree.items() if key in type(record).model_fields})
    )


def _without_folders(value: Any) -> Any:
    """Return JSON whose absolute paths are `./` and their last part; labels, instructions and prompts are no paths."""
    if isinstance(value, dict):
        return {key: item if key in TEXTS else _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    if match := SQLITE.fullmatch(value):
        return f"{match['start']}{Path(match['path']).name}{match['split']}"
    return f"./{Path(value).name}" if value.startswith("file:") or Path(value).is_absolute() else value


def tensors_in(folder: Storage) -> dict[str, Tensor]:
    """Return the tensors of an adapter in PEFT's layout by their names in a bank.

    Raises:
        BankError: a file is no whole safetensors file. StorageError: it cannot be read.
    """
    tensors = names_in_bank(views(folder.read(TENSORS), f"'{folder.uri}/{TENSORS}'"))
    if folder.exists(HEAD):
        head = views(folder.read(HEAD), f"'{folder.uri}/{HEAD}'")
        tensors |= {HEAD_WEIGHT: head["weight"], HEAD_BIAS: head["bias"]} if {"weight", "bias"} <= head.keys() else {}
    return tensors


def pull(address: HubAddress, target: Callable[[str], Bank]) -> tuple[Bank, Snapshot, str]:
    """Copy a snapshot of the hub into a bank; returns the bank, the snapshot and its branch there.

    Everything is fetched and checked by its hash before the snapshot's record is written, and its branch moves last.
    A pull that was interrupted continues: files that have come are not fetched again.

    Args:
        target: returns the bank for a commit.

    Raises:
        BankError: the address names a folder, there is no such repository, it holds no bank, a file is missing or
            damaged, or the bank has another snapshot of that number.
        BranchMovedError: its branch has snapshots that are not from this repository.
    """
    if address.folder:
        raise BankError(
            f"{address} names the folder '{address.folder}', and a bank is a whole repository: expected "
            "hf://ORG/NAME or hf://ORG/NAME@REVISION"
        )
    folder = address.fetch([f"{ROOT}/*.json"])
    pinned = HubAddress(address.repository, revision=folder.name)
    source, bank = Bank.at(folder / ROOT), target(folder.name)
    try:
        record = read_fields(source.storage, RECORD, FORMAT, HubRecord)
        snapshot = source.open(record.number)
        if snapshot.sha256 != record.sha256:
            raise BankError(f"snapshot {record.number} is not the one that {RECORD} names")
        files = records_of(snapshot)
        for entry in snapshot.adapters:
            source.manifest(entry.ref)
        _check_same(bank, source, files, address)
        _check_line(bank, snapshot, record.ancestors, address)
        objects = objects_to_pull(source, snapshot, record.without)
    except (StorageError, BankError) as error:
        raise BankError(f"{pinned} cannot be pulled: {error}; push it again") from error
    folders = {entry.tensors.file: record.peft[entry.name] for entry in snapshot.adapters if entry.name in record.peft}
    wanted = {file: info for file, info in objects.items() if not bank.is_whole(info)}
    if wanted:
        pinned.fetch([glob.escape(name) for file in wanted for name in _fetched(file, folders)])
    for file, info in counted_off(wanted.items(), "checking what was pulled"):
        _place(bank, source, info, Storage.at(folder / folders[file]) if file in folders else None, pinned)
    _explain_missing(bank, snapshot, record.without)
    for file in files:
        _copy_record(bank, source, file, address)
    snapshot = bank.open(record.number)
    _move(bank, snapshot, record.branch, pinned)
    log.info("pulled %s: snapshot %d, %s", pinned, snapshot.number, counted(len(snapshot.tasks), "task"))
    return bank, snapshot, record.branch


def cached(address: str) -> tuple[Bank, Snapshot]:
    """Return the bank and snapshot that an address means, pulled into raycl's cache, a bank for each commit.

    Raises:
        BankError: see `pull`.
    """
    parsed = HubAddress.of(address)
    return pull(parsed, lambda commit: Bank.at(cache_folder(None) / "hub" / parsed.repository / commit))[:2]


def _copy_record(bank: Bank, source: Bank, file: str, address: HubAddress) -> None:
    """Create a record that the bank lacks; another pull of the same repository may create it first."""
    if bank.storage.exists(file):
        return
    try:
        bank.storage.create(file, source.storage.read(file, MAX_BYTES))
    except AlreadyExistsError:
        _check_same(bank, source, [file], address)


def _check_same(bank: Bank, source: Bank, files: Sequence[str], address: HubAddress) -> None:
    for file in files:
        if not bank.storage.exists(file):
            continue
        theirs, ours = source.storage.read(file, MAX_BYTES), bank.storage.read(file, MAX_BYTES)
        if theirs not in (ours, shared_record(file, ours)):
            raise BankError(f"the bank '{bank.storage.uri}' has another '{file}': pull {address} into another folder")


def _check_line(bank: Bank, snapshot: Snapshot, ancestors: Mapping[int, str], address: HubAddress) -> None:
    """Check that numbers of snapshots that it descends from mean the same snapshots in the bank."""
    there = set(bank.snapshots())
    unknown = {snapshot.parent: ""} if snapshot.parent is not None else {}
    for number, sha256 in {**unknown, **ancestors}.items():
        ours = bank.open(number) if number in there else None
        if ours is not None and sha256 not in (ours.sha256, shared(ours).sha256):
            raise BankError(
                f"the bank '{bank.storage.uri}' has another snapshot {number} than the one before snapshot "
                f"{snapshot.number}: pull {address} into another folder"
            )


def _fetched(file: str, folders: Mapping[str, str]) -> list[str]:
    if file not in folders:
        return [f"{ROOT}/{file}"]
    return [f"{check_name(folders[file])}/{name}" for name in (TENSORS, HEAD)]


def _place(bank: Bank, source: Bank, info: ObjectInfo, peft: Storage | None, address: HubAddress) -> None:
    """Write an object to the bank, after its hash was checked."""
    where = f"{ROOT}/{info.file}" if peft is None else f"{Path(peft.root).name}/{TENSORS}"
    try:
        if peft is not None and bank.restore_object(info, tensors_in(peft)):
            return
        if peft is None and source.is_whole(info):
            bank.storage.write(info.file, source.storage.read(info.file))
            return
    except (BankError, StorageError) as error:
        raise BankError(f"'{where}' of {address} is missing or no safetensors file ({error}): push it again") from error
    raise BankError(
        f"'{where}' of {address} is damaged: its hash is not {info.sha256[:12]}; push it again, or remove the "
        f"repository from the cache if the file changed on this machine (`hf cache rm model/{address.repository}`)"
    )


def _explain_missing(bank: Bank, snapshot: Snapshot, without: Sequence[str]) -> None:
    """Record that older snapshots and samples were left out, so that they are not missed."""
    removed, there = removed_from(bank.storage), set(bank.snapshots())
    older = [snapshot.parent] if snapshot.parent and snapshot.parent not in there | removed.snapshots else []
    samples = [file for file in without if file not in removed.samples and not bank.storage.exists(file)]
    if older or samples:
        record_removal(bank.storage, older, [], samples)


def _move(bank: Bank, snapshot: Snapshot, name: str, address: HubAddress) -> None:
    """Move the branch forward; one that was pulled from the same repository before may jump."""
    branch, why = Branch(bank, name), f"pulled from {HUB}{address.repository}"
    last = branch.last()
    if last is not None and last.snapshot is not None and is_ancestor(bank, snapshot.number, bank.open(last.snapshot)):
        return
    was_pulled = last is not None and last.why.startswith(why) and (last.snapshot or 0) <= snapshot.number
    branch.advance(snapshot, f"{why}@{address.revision}", lambda _: was_pulled)
