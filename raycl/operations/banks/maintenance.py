"""Looking after a bank: is it whole, what is no longer needed, what changed between two snapshots."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from raycl.bank.activations import FOLDER as SERVING
from raycl.bank.activations import Activations, activated, followed
from raycl.bank.bank import Bank
from raycl.bank.branches import FOLDER as BRANCHES
from raycl.bank.branches import NOT_SERVED, Branch, branch_names, branch_of, line_of, numbered_folders
from raycl.bank.manifest import (
    AdapterManifest,
    AdapterRef,
    ObjectInfo,
    Snapshot,
    SnapshotAdapter,
    adapter_of,
    is_object,
    manifest_file,
    snapshot_file,
)
from raycl.bank.pruning import LEASES, is_lease, lease_problems, leased, record_removal, removed_from
from raycl.bank.states import is_state, state_file, state_objects
from raycl.errors import BankError
from raycl.operations.banks.sample_listing import sample_files
from raycl.progress import counted_off
from raycl.storage.folder import StoredFile
from raycl.storage.records import number_of

GRACE_S = 3600.0
"""Files younger than this are never pruned: their writer may be about to publish them."""


@dataclass
class Verification:
    """The findings of `verify`.

    Attributes:
        problems: one sentence each; a whole bank has none.
        leftovers: files that no manifest names, of writers that are running or died; they do no harm.
        strays: files that no bank writes; they are ignored and never removed.
    """

    adapters: int = 0
    snapshots: int = 0
    objects: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Make an error of the bank inside a problem."""
        try:
            yield
        except BankError as error:
            self.problems.append(str(error))


@dataclass
class Pruned:
    """The objects that `prune` removed, or would remove."""

    snapshots: list[int] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    bytes: int = 0


@dataclass(frozen=True)
class Named:
    """A snapshot that a run refers to.

    Attributes:
        owner: `phase 2 of RUN`, for messages.
        adapters: name -> version, as they were published with it.
    """

    snapshot: int
    owner: str
    adapters: dict[str, int]


def verify(bank: Bank, named: Sequence[Named] = ()) -> Verification:
    """Read everything: records, hashes, shapes; and is all there that parents, activations and `named` count on?"""
    findings = Verification()
    removed = removed_from(bank.storage)
    findings.problems += [*removed.problems, *lease_problems(bank.storage)]
    objects: dict[str, list[str]] = {}
    read: set[str] = set()  # objects of training states, most of which many snapshots name
    for manifest in _manifests(bank, findings):
        findings.adapters += 1
        for info in _objects(manifest):
            objects.setdefault(info.file, []).append(str(manifest.ref))
        with findings.collected():
            bank.fetch(manifest)
    there = set(bank.snapshots()) | removed.snapshots
    for snapshot in _snapshots(bank, findings):
        findings.snapshots += 1
        if snapshot.parent is not None and snapshot.parent not in there:
            findings.problems.append(_gone(snapshot.parent, f"snapshot {snapshot.number} names as its parent"))
        for entry in snapshot.adapters:
            file = manifest_file(entry.name, entry.version)
            if not bank.storage.exists(file):
                findings.problems.append(f"snapshot {snapshot.number} names {entry}, which is not published")
        if snapshot.router.tensors is not None:
            with findings.collected():
                bank.get(snapshot.router.tensors, f"the router of snapshot {snapshot.number}")
        with findings.collected():
            for group, info in state_objects(bank, snapshot).items():
                if info.sha256 in read or (info.file in removed.samples and not bank.storage.exists(info.file)):
                    continue
                read.add(info.sha256)
                bank.read_object(info, f"the training state of snapshot {snapshot.number} ({group})")
        for file in _files_of(bank, snapshot, findings):
            objects.setdefault(file, []).append(f"snapshot {snapshot.number}")
    _decided(bank, there, findings)
    _counted_on(bank, named, there, findings)
    files = bank.storage.files()
    for file, users in objects.items():
        if file not in files and file in removed.samples:
            continue
        if file not in files:
            findings.problems.append(f"'{file}' is missing, which {users[0]} needs")
        else:
            findings.objects += 1
            findings.bytes += files[file].size
    findings.leftovers = sorted(
        file for file, info in files.items() if info.unfinished or (is_object(file) and file not in objects)
    )
    findings.strays = sorted(file for file, info in files.items() if not (info.unfinished or _is_written(file)))
    findings.problems = list(dict.fromkeys(findings.problems))
    return findings


def _gone(number: int, which: str) -> str:
    return f"snapshot {number} is gone, which {which}, and no pruning removed it: restore a copy, or resume its run"


def _decided(bank: Bank, there: set[int], findings: Verification) -> None:
    """Return the snapshots that moves of branches and decisions of endpoints name."""
    for name in numbered_folders(bank, BRANCHES):
        branch = Branch(bank, name)
        findings.problems += branch.records.problems()
        for number in branch.numbers():
            with findings.collected():
                move = branch.move(number)
                if move.snapshot is not None and move.snapshot not in there:
                    findings.problems.append(_gone(move.snapshot, f"move {number} of branch '{name}' names"))
    for name in followed(bank):
        activations = Activations(bank, name)
        findings.problems += activations.records.problems()
        for decision in activations.all():
            if isinstance(decision, BankError):
                findings.problems.append(str(decision))
            elif decision.snapshot not in there:
                which = f"decision {decision.number} of the endpoints that follow '{name}' names"
                findings.problems.append(_gone(decision.snapshot, which))


def _counted_on(bank: Bank, named: Sequence[Named], there: set[int], findings: Verification) -> None:
    for name in named:
        if name.snapshot not in there:
            findings.problems.append(_gone(name.snapshot, f"{name.owner} published"))
            continue
        try:
            versions = {entry.name: entry.version for entry in bank.open(name.snapshot).adapters}
        except BankError:
            continue  # pruned, or a problem already
        if versions != name.adapters:
            findings.problems.append(
                f"snapshot {name.snapshot} is not the one that {name.owner} published: its adapters differ"
            )


def prune(
    bank: Bank,
    keep_snapshots: int | None = None,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    sample_days: float | None = None,
) -> Pruned:
    """Remove what no snapshot names: older versions, forgotten adapters, leftovers of dead writers; and old samples.

    Args:
        keep_snapshots: number of the newest snapshots of each branch that stay, besides those that an endpoint answers
            from and that an unfinished run may continue from; those on no branch go too; None: all stay.
        grace_s: nothing younger is touched.
        sample_days: stored samples that are older are removed from all snapshots; None: as each snapshot's run says
            (`bank.sample_days`).

    Raises:
        BankError: a snapshot cannot be read, so its needs are unknown; nothing is removed.
    """
    if keep_snapshots is not None and keep_snapshots < 1:
        raise BankError(f"keep_snapshots is {keep_snapshots}: at least the newest snapshot must stay")
    files = bank.storage.files()
    numbers = bank.snapshots()
    old = []
    if keep_snapshots:
        lines = [list(line_of(bank, name)) for name in branch_names(bank)]
        on_branches = {number for line in lines for number in line}
        needed = (
            {number for line in lines for number in line[:keep_snapshots]}
            | activated(bank)
            | leased(bank.storage).keys()
        )
        young = {n for n in numbers if n not in on_branches and files[snapshot_file(n)].age < grace_s}
        old = [number for number in numbers if number not in needed | young]
    kept = [bank.open(number) for number in numbers if number not in old]
    named = {(entry.name, entry.version) for snapshot in kept for entry in snapshot.adapters}
    needed_files = {file for snapshot in kept for file in _files_of(bank, snapshot)}
    pruned = Pruned(snapshots=old)
    doomed = [snapshot_file(number) for number in old]
    for manifest in _manifests(bank, None):
        if (manifest.name, manifest.version) in named or files[manifest.file].age < grace_s:
            needed_files |= {info.file for info in _objects(manifest)}
        else:
            pruned.adapters.append(str(manifest.ref))
            doomed.append(manifest.file)
    for file, info in files.items():
        unneeded = (is_object(file) or is_state(file)) and file not in needed_files
        if (info.unfinished or unneeded) and info.age >= grace_s:
            doomed.append(file)
    pruned.samples = sorted(_old_samples(bank, kept, files, sample_days))
    doomed += pruned.samples
    pruned.files = doomed
    pruned.bytes = sum(files[file].size for file in doomed)
    if not dry_run:
        if pruned.snapshots or pruned.adapters or pruned.samples:
            record_removal(bank.storage, pruned.snapshots, pruned.adapters, pruned.samples)
        for file in counted_off(doomed, "removing files"):  # records go before the tensors they name
            bank.storage.delete(file)
    return pruned


def _old_samples(
    bank: Bank, snapshots: Sequence[Snapshot], files: Mapping[str, StoredFile], days: float | None
) -> set[str]:
    """Return files of stored samples that are older than so many days, or than their run allows."""
    expired = set()
    for snapshot in snapshots:
        limit = days if days is not None else snapshot.provenance.get("config", {}).get("bank", {}).get("sample_days")
        if limit is None:
            continue
        named = sample_files(bank, snapshot) & files.keys()
        expired |= {file for file in named if files[file].age > limit * 86400}
    return expired


def diff(old: Snapshot, new: Snapshot) -> dict[str, Any]:
    """Return what changed: adapters added, removed and replaced, tasks, router, backbone, encoder."""
    before = {entry.name: entry for entry in old.adapters}
    after = {entry.name: entry for entry in new.adapters}
    both = before.keys() & after.keys()
    tasks = [{task.name for task in snapshot.tasks} for snapshot in (old, new)]
    parts = ("backbone", "encoder", "router")
    return {
        "from": old.number,
        "to": new.number,
        "added": [str(after[name]) for name in sorted(after.keys() - before.keys())],
        "removed": [str(before[name]) for name in sorted(before.keys() - after.keys())],
        "replaced": [
            f"{before[name]} -> {after[name]}" for name in sorted(both) if before[name].tensors != after[name].tensors
        ],
        "tasks_added": sorted(tasks[1] - tasks[0]),
        "tasks_removed": sorted(tasks[0] - tasks[1]),
        "changed": [part for part in parts if getattr(old, part) != getattr(new, part)],
    }


def _manifests(bank: Bank, findings: Verification | None) -> Iterator[AdapterManifest]:
    """Yield every readable manifest; others become problems, or an error where problems are not collected."""
    for name in counted_off(bank.names(), "reading adapters"):
        for version in bank.versions(name):
            with nullcontext() if findings is None else findings.collected():
                yield bank.manifest(AdapterRef(name=name, version=version))


def _snapshots(bank: Bank, findings: Verification) -> Iterator[Snapshot]:
    for number in counted_off(bank.snapshots(), "reading snapshots"):
        with findings.collected():
            yield bank.open(number)


def _objects(entry: AdapterManifest | SnapshotAdapter) -> list[ObjectInfo]:
    return [entry.tensors, *entry.extras.values()]


def _files_of(bank: Bank, snapshot: Snapshot, findings: Verification | None = None) -> set[str]:
    """Return files of tensors and training state; an unreadable state is an error unless problems are collected."""
    files = {info.file for entry in snapshot.adapters for info in _objects(entry)}
    files |= {snapshot.router.tensors.file} if snapshot.router.tensors else set()
    if snapshot.training is not None:
        files.add(state_file(snapshot.training))
        try:
            files |= {info.file for info in state_objects(bank, snapshot).values()}
        except BankError:
            if findings is None:
                raise
    return files


def _is_written(file: str) -> bool:
    folder, _, rest = file.partition("/")
    if folder in ("snapshots", "pruned"):
        return number_of(rest) is not None
    if folder in (SERVING, BRANCHES):
        return branch_of(file, folder) is not None
    if folder == "states":
        return is_state(file)
    if folder == LEASES:
        return is_lease(file)
    return is_object(file) or adapter_of(file) is not None or file == NOT_SERVED
