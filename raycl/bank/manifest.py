"""Records of adapters and snapshots: small JSON, read strictly.

objects/<2 hex>/<sha256>.safetensors     tensors, named by their content: written first, meaning nothing alone
adapters/<name>/<version>.json           a manifest, created exclusively: with it the version is published
snapshots/<number>.json                  names adapters, router, backbone and encoder by hash; created exclusively
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from raycl.config import Section, validate
from raycl.config.names import REFERENCE_SIGNS, problem_of, shown
from raycl.errors import BankError, ConfigError, DamagedError, FormatError
from raycl.storage import Storage
from raycl.storage.records import MAX_BYTES, number_of, numbered, seal, unseal
from raycl.types import Activation

R = TypeVar("R", bound=Section)

FORMAT = 6
"""The number of the rules for both records: it is raised with every change of their fields, which changes hashes."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
HASH = re.compile(r"[0-9a-f]{64}")
OBJECT = re.compile(r"objects/([0-9a-f]{2})/\1[0-9a-f]{62}\.safetensors")


def check_name(name: str) -> str:
    """Check that an adapter's name is a plain file name, in any script, which cannot leave the bank's folder.

    Raises:
        BankError: the name is invalid.
    """
    if problem := problem_of(name, REFERENCE_SIGNS):
        raise BankError(f"{shown(name)} cannot name an adapter, {problem}")
    return name


def _name(value: str) -> str:
    try:
        return check_name(value)
    except BankError as error:
        raise ValueError(str(error)) from error


def _hash(value: str) -> str:
    if not HASH.fullmatch(value):
        raise ValueError(f"'{value[:80]}' is no SHA-256: expected 64 hexadecimal digits")
    return value


PUBLISHED_WITH = ("run", "fingerprint", "phase", "phase_name")
"""The fields that the provenances of an adapter and of its snapshot both say."""

DERIVED = ("forgotten", "fused", "imported", "merged")
"""Fields of the provenance of a snapshot that no run published; one for each operation that makes such snapshots."""

Name = Annotated[str, AfterValidator(_name)]
Sha256 = Annotated[str, AfterValidator(_hash)]
Layout = dict[str, tuple[int, int]]
"""Path of a linear -> inputs and outputs."""


class AdapterRef(Section):
    """One version of one adapter."""

    name: Name
    version: int = Field(ge=1)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


class ObjectInfo(Section):
    """A file of tensors, named by its content."""

    sha256: Sha256
    bytes: int = Field(ge=0)

    @property
    def file(self) -> str:
        """The path of its file in the bank."""
        return f"objects/{self.sha256[:2]}/{self.sha256}.safetensors"


class ModelInfo(Section):
    """A pretrained model: its name, and the hash of its files."""

    name: str
    sha256: Sha256
    kind: str = ""


class _Adapter(Section):
    """The fields that a manifest and an entry of a snapshot share."""

    name: Name
    version: int = Field(ge=1)
    tensors: ObjectInfo
    rank: int = Field(ge=0)
    scale: float
    activation: Activation = Field("", description="between A and B; manifests without it have none")
    use_dora: bool = Field(False, description="it has magnitudes")
    copies: dict[str, tuple[int, ...]] = Field(default_factory=dict, description="shapes of copies of modules")
    dtype: str
    prompt: tuple[int, int] | None = None
    labels: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    extras: dict[str, ObjectInfo] = Field(default_factory=dict, description="pseudo samples and the like, by kind")

    @property
    def is_alone(self) -> bool:
        """Return whether it is no sum with other adapters."""
        return bool(self.use_dora or self.copies)

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(name=self.name, version=self.version)

    def __str__(self) -> str:
        return str(self.ref)


class AdapterManifest(_Adapter):
    """One published version."""

    format: int = FORMAT
    layout: Layout
    backbone: ModelInfo
    provenance: dict[str, Any] = Field(default_factory=dict, description="run, phase and config that created it")

    @property
    def file(self) -> str:
        """The path of its file in the bank."""
        return manifest_file(self.name, self.version)


class SnapshotAdapter(_Adapter):
    """An adapter of a snapshot, with the fields to fetch and check it without its manifest."""

    layout: str = Field(description="key of the snapshot's layouts")


class TaskInfo(Section):
    """A learned task."""

    name: str
    labels: tuple[str, ...] | None = None
    metric: str = "exact_match"
    prompt: tuple[str, str] = Field(("", ""), description="what stood before and behind every input text")
    chat_template: str = Field(
        "", description="Jinja source that rendered the inputs as conversations; empty: none did"
    )
    system: str = Field("", description="system message of conversations without one")
    definition: str = Field("", description="instruction in what stood before the texts; empty: none, or `system`")
    user_turns: int = Field(
        0, ge=0, description="messages of the user that routers read of an input; 0: inputs are no conversations"
    )


class RouterInfo(Section):
    """A router: kind, settings, and tensors by hash."""

    kind: str
    settings: dict[str, Any] = Field(default_factory=dict)
    tensors: ObjectInfo | None = None
    package: str = Field("", description="package and version that the kind comes from; empty: raycl")


class Snapshot(Section):
    """An immutable state of everything learned, from which serving and evaluation start."""

    format: int = FORMAT
    number: int = Field(ge=1)
    parent: int | None = Field(None, ge=1)
    backbone: ModelInfo
    encoder: ModelInfo | None = None
    router: RouterInfo
    tasks: tuple[TaskInfo, ...] = ()
    layouts: dict[str, Layout] = Field(default_factory=dict)
    adapters: tuple[SnapshotAdapter, ...] = ()
    training: Sha256 | None = Field(None, description="record of what training needs to continue from here")
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _parent_is_older(self) -> Self:
        """Refuse a parent that is not older, so that walks over parents end."""
        if self.parent is not None and self.parent >= self.number:
            raise ValueError(f"its parent is snapshot {self.parent}: expected one below {self.number}")
        return self

    @property
    def file(self) -> str:
        """The path of its file in the bank."""
        return snapshot_file(self.number)

    @property
    def is_derived(self) -> bool:
        """True if an operation on the bank made it of others; its provenance is otherwise that of their run."""
        return not self.provenance.keys().isdisjoint(DERIVED)

    def require_task(self, name: str) -> None:
        """Check that a task is there.

        Raises:
            BankError: there is no such task.
        """
        names = [task.name for task in self.tasks]
        if name not in names:
            raise BankError(
                f"snapshot {self.number} has no task '{name}': expected one of {', '.join(names) or 'none'}"
            )

    def adapter(self, name: str) -> SnapshotAdapter:
        """Return the adapter of that name.

        Raises:
            BankError: there is none.
        """
        for entry in self.adapters:
            if entry.name == name:
                return entry
        names = ", ".join(adapter.name for adapter in self.adapters[:20]) or "none"
        raise BankError(f"snapshot {self.number} has no adapter '{name}': expected one of {names}")

    def token_limits(self, task: str = "") -> tuple[int | None, int | None]:
        """Return the token limits of a source and of a target of a task in its run; None: no run created the snapshot.

        Args:
            task: name of a task; for any other name the largest limits of any task.
        """
        return self._token_limits.get(task) or self._token_limits[""]

    @cached_property
    def _token_limits(self) -> dict[str, tuple[int | None, int | None]]:
        """The limits of each task, and as "" the largest of any; made once, since every request asks."""
        stream = self.provenance.get("config", {}).get("stream", {})

        def of(task: str, key: str) -> int | None:
            limit = stream.get(f"{key}_by_task", {}).get(task, stream.get(key))
            return limit if isinstance(limit, int) else None

        names = [task.name for task in self.tasks]
        sources = {name: of(name, "max_source_tokens") for name in names or [""]}
        targets = {name: of(name, "max_target_tokens") for name in names or [""]}
        largest = [max((limit for limit in limits.values() if limit), default=None) for limits in (sources, targets)]
        return {name: (sources[name], targets[name]) for name in names} | {"": (largest[0], largest[1])}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(dump(self)).hexdigest()

    def same_content(self, other: Snapshot) -> bool:
        """Return whether both are equal apart from number, parent, provenance, and training state (it names times)."""
        skip = {"number", "parent", "provenance", "training"}
        return self.model_dump(exclude=skip) == other.model_dump(exclude=skip)


def manifest_of(entry: SnapshotAdapter, snapshot: Snapshot) -> AdapterManifest:
    """Return the manifest of an adapter's version as it was published with a snapshot that names it first."""
    held = entry.model_dump(exclude={"layout"})
    provenance = {key: snapshot.provenance[key] for key in PUBLISHED_WITH if key in snapshot.provenance}
    whole = {"layout": snapshot.layouts[entry.layout], "backbone": snapshot.backbone, "provenance": provenance}
    return AdapterManifest(**held, **whole)


def manifest_file(name: str, version: int) -> str:
    """Return the file name, such as `adapters/agnews/000001.json`."""
    return f"adapters/{check_name(name)}/{numbered(version)}"


def snapshot_file(number: int) -> str:
    """Return the file name, such as `snapshots/000001.json`."""
    return f"snapshots/{numbered(number)}"


def is_object(file: str) -> bool:
    """Return whether a file is called as a bank's tensors are."""
    return OBJECT.fullmatch(file) is not None


def adapter_of(file: str) -> AdapterRef | None:
    """Return the version whose manifest has this place; None for every other file."""
    folder, _, rest = file.partition("/")
    name, _, record = rest.partition("/")
    number = number_of(record)
    if folder != "adapters" or number is None or problem_of(name, REFERENCE_SIGNS):
        return None
    return AdapterRef(name=name, version=number)


def dump(record: AdapterManifest | Snapshot) -> bytes:
    """Return canonical JSON with its own hash."""
    return seal(record.model_dump(mode="json"))


def parse_manifest(data: bytes, file: str) -> AdapterManifest:
    """Read back what `dump` wrote.

    Raises:
        BankError: the file is not JSON, has another format, was changed or moved.
    """
    record = _parsed(AdapterManifest, data, file)
    if record.file != file:
        raise BankError(f"'{file}' holds {record.ref}: it was moved or edited; restore it from a copy")
    return record


def parse_snapshot(data: bytes, file: str | None) -> Snapshot:
    """Read back what `dump` wrote.

    Args:
        file: its name in the bank; None: a copy elsewhere.

    Raises:
        BankError: see `parse_manifest`.
    """
    record = _parsed(Snapshot, data, file or "a copy of a snapshot")
    if file is not None and record.file != file:
        raise BankError(f"'{file}' holds snapshot {record.number}: it was moved or edited; restore a copy")
    return record


def _parsed(model: type[R], data: bytes, file: str) -> R:
    with bank_errors():
        record = unseal(data, file, FORMAT)
    try:
        return validate(model, record)
    except ConfigError as error:
        raise BankError(f"'{file}' is no valid record: {error}") from error


def read_bytes(storage: Storage, file: str) -> bytes:
    """Return a record's file.

    Raises:
        BankError: it is larger than any record. StorageError: it cannot be read.
    """
    with bank_errors():
        return storage.read(file, MAX_BYTES)


@contextmanager
def bank_errors(remedy: str = "") -> Iterator[None]:
    """Turn what is wrong with a record into a BankError.

    Args:
        remedy: what else can be done about a damaged one.
    """
    try:
        yield
    except DamagedError as error:
        raise BankError(f"{error}{remedy}") from error
    except FormatError as error:
        raise BankError(str(error)) from error
