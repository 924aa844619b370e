"""Checkpoints: safetensors first, manifest last, hash checked on read, whole or absent.

Everything is stored by parameter name, so a checkpoint of N workers under one engine continues on any other number and
engine. Where workers share parameters out, each writes its rows to a file of its own, and reading joins them. The data
position and all randomness follow from the seed and the step, so they need no file.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from raycl.bank.manifest import ObjectInfo, Sha256
from raycl.bank.tensor_groups import TensorGroups
from raycl.bank.tensors import packed
from raycl.config.names import FolderName
from raycl.errors import CheckpointError, DamagedError, FormatError, RunError
from raycl.methods.base import Learned
from raycl.storage import Storage
from raycl.storage.records import MAX_BYTES, fields_of, seal, unseal
from raycl.storage.unfinished import Buffer
from raycl.training.records.schema import Natural, Publication, RouterRecord
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.workers.distributed import is_shared_out, whole

FOLDER = "checkpoints"
PARAMETERS, OPTIMIZER = "parameters.safetensors", "optimizer.safetensors"
MANIFEST, SNAPSHOT = "manifest.json", "snapshot.json"
FORMAT = 8
VALUES = ("phase", "step", "steps", "method", "spent", "published", "modifiers", "router")
"""Fields of a checkpoint that its manifest holds as they are."""

PYTORCH = {"format": "pt"}
"""The metadata that `transformers` expects in a header."""

Extent = tuple[int, int | list[int]]
"""The first row of a part, and the rows of the whole; or the first element of a flat part, and the whole's shape."""


@dataclass
class Checkpoint:
    """A place to continue from.

    Attributes:
        phase: index of the phase.
        step: optimizer steps done in it; `steps` means that the phase's training is over.
        method: the method's `state_dict`.
        parameters: whole learned parameters by name.
        optimizer: `<parameter>/<moment>` -> tensor; empty when the phase is over.
        spent: seconds and tokens of the phase so far, added up over attempts, and bytes that a step moves.
        published: objects published at the end of the phase (`raycl.training.records.publish`).
        frozen_state: tensors of the method and of modifiers that are no parameters.
        modifiers: state of gradient modifiers by name.
        snapshot: a copy of the snapshot's record, where one was published: the bank may lose its own.
        router: router of the phase that ends here (`raycl.training.phase.routing`); its tensors are in `frozen_state`.
        places, is_part: fields of one worker's share, which is written and never read (`Share` of
            `raycl.training.engines.engine`).
    """

    phase: int
    step: int
    steps: int
    method: dict[str, Any]
    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    frozen_state: Mapping[str, Tensor] = field(default_factory=dict)
    modifiers: dict[str, Any] = field(default_factory=dict)
    snapshot: bytes = b""
    router: dict[str, Any] = field(default_factory=dict)
    places: Mapping[str, Extent] = field(default_factory=dict)
    is_part: bool = False

    @property
    def is_phase_end(self) -> bool:
        """Return whether the phase's training is over."""
        return self.step == self.steps

    @property
    def covers(self) -> int:
        """Phases whose training is over with it."""
        return self.phase + self.is_phase_end

    def name(self, attempt: int) -> str:
        """Return the folder name, unique over attempts."""
        return f"phase{self.phase:03d}-step{self.step:07d}-attempt{attempt:04d}"


@dataclass(frozen=True)
class WrittenFile:
    """A file of tensors in a checkpoint's folder.

    Attributes:
        places: name of a tensor of which the file has a part -> which part.
    """

    sha256: str
    places: dict[str, Extent] = field(default_factory=dict)


@dataclass(frozen=True)
class _Manifest:
    """The record of a checkpoint; attributes as in `Checkpoint`.

    Attributes:
        objects: group -> object of its frozen tensors. sha256: file -> hash. places: file -> `WrittenFile.places`.
    """

    phase: Natural
    step: Natural
    steps: Natural
    method: dict[str, Any]
    spent: dict[str, int | float]
    published: Publication
    modifiers: dict[str, Any]
    router: RouterRecord
    objects: dict[str, ObjectInfo]
    sha256: dict[FolderName, Sha256]
    places: dict[FolderName, dict[str, tuple[Natural, Natural | list[Natural]]]]


def write_checkpoint(storage: Storage, name: str, checkpoint: Checkpoint, objects: TensorObjects) -> str:
    """Write the folder `checkpoints/<name>`, and objects that it names and the run has neither written nor read.

    Returns:
        SHA-256 of its manifest, by which the journal names it.
    """
    manifest = begin_checkpoint(storage, name, checkpoint, objects)
    return commit_checkpoint(storage, name, manifest, write_share(storage, name, checkpoint, 0))


def write_share(storage: Storage, name: str, checkpoint: Checkpoint, rank: int) -> dict[str, WrittenFile]:
    """Write a worker's tensors, one after another from where they are; those of workers without any leave no file."""
    folder = storage.sub(f"{FOLDER}/{name}")
    written: dict[str, WrittenFile] = {}
    for file, tensors in ((PARAMETERS, checkpoint.parameters), (OPTIMIZER, checkpoint.optimizer)):
        if rank and not tensors:
            continue
        file = file if not rank else file.replace(".", f"-{rank:05d}.")
        sha256 = _write_packed(folder, file, partial(packed, tensors, tensors.__getitem__))
        owners = {key: key.rpartition("/")[0] or key for key in tensors}
        places = {key: checkpoint.places[owner] for key, owner in owners.items() if owner in checkpoint.places}
        written[file] = WrittenFile(sha256, places)
    return written


def _write_packed(folder: Storage, file: str, parts: Callable[[], Iterator[Buffer]]) -> str:
    """Write a file whose parts are made one after another; returns its SHA-256."""
    digest = hashlib.sha256()

    def hashed() -> Iterator[Buffer]:
        nonlocal digest
        digest = hashlib.sha256()
        for part in parts():
            digest.update(part)
            yield part
            del part

    folder.write_parts(file, hashed)
    return digest.hexdigest()


def begin_checkpoint(storage: Storage, name: str, checkpoint: Checkpoint, objects: TensorObjects) -> dict[str, Any]:
    """Write what the first worker alone has, and return the manifest, in which the files of workers are missing.

    Nothing of it changes afterwards, whatever the method and modifiers do.
    """
    folder = storage.sub(f"{FOLDER}/{name}")
    groups = TensorGroups.of(checkpoint.frozen_state).groups
    named = {group: objects.put(group, tensors) for group, tensors in groups.items()}
    hashes = {}
    if checkpoint.snapshot:
        folder.write(SNAPSHOT, checkpoint.snapshot)
        hashes[SNAPSHOT] = hashlib.sha256(checkpoint.snapshot).hexdigest()
    values = {name: getattr(checkpoint, name) for name in VALUES}
    stored = {group: info.model_dump() for group, info in named.items()}
    return copy.deepcopy({"format": FORMAT, **values, "objects": stored, "sha256": hashes, "places": {}})


def commit_checkpoint(
    storage: Storage, name: str, manifest: Mapping[str, Any], written: Mapping[str, WrittenFile]
) -> str:
    """Write the manifest, which names the files of all workers: from now on the checkpoint exists; returns its hash."""
    hashes = manifest["sha256"] | {file: share.sha256 for file, share in written.items()}
    places = {file: share.places for file, share in written.items() if share.places}
    data = seal({**manifest, "sha256": hashes, "places": places})
    storage.sub(f"{FOLDER}/{name}").write(MANIFEST, data)
    return hashlib.sha256(data).hexdigest()


def read_checkpoint(
    storage: Storage, name: str, objects: TensorObjects | None = None, partial: bool = False, sha256: str | None = None
) -> Checkpoint:
    """Read `checkpoints/<name>`.

    Args:
        sha256: hash of its manifest in the journal; None: any.
        objects: store from which frozen tensors are read; None: the run's folder alone.
        partial: frozen tensors that cannot be read are left out.

    Raises:
        CheckpointError: a file is missing, cut or changed, or of another checkpoint. RunError: it has another version.
        StorageError: out of reach.
    """
    folder = storage.sub(f"{FOLDER}/{name}")
    manifest = _manifest(folder, sha256)
    files = {file: _file(folder, file, digest) for file, digest in manifest.sha256.items()}
    groups = (objects or TensorObjects(storage)).get(manifest.objects, partial)
    return Checkpoint(
        **{name: getattr(manifest, name) for name in VALUES},
        parameters=_joined(folder, files, PARAMETERS, manifest.places),
        optimizer=_joined(folder, files, OPTIMIZER, manifest.places),
        frozen_state=TensorGroups(groups),
        snapshot=files.get(SNAPSHOT, b""),
    )


def _joined(folder: Storage, files: Mapping[str, bytes], name: str, places: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors of a file and of those of other workers, the rows of each put together."""
    tensors: dict[str, Tensor] = {}
    own = [file for file in files if file.partition(".")[0].partition("-")[0] == name.partition(".")[0]]
    try:
        for file in own:
            for key, tensor in load(files[file]).items():
                if key not in places.get(file, {}):
                    tensors[key] = tensor
                    continue
                first, of = places[file][key]
                shape = (of, *tensor.shape[1:]) if isinstance(of, int) else of
                held = tensors.setdefault(key, torch.empty(*shape, dtype=tensor.dtype))
                (held if isinstance(of, int) else held.view(-1))[first : first + len(tensor)] = tensor
    except (SafetensorError, RuntimeError, LookupError) as error:  # the hash is right, and what has it is not
        raise CheckpointError(f"'{folder.uri}' has no whole {name}: {error}; restore a copy") from error
    return tensors


def read_snapshot(storage: Storage, name: str, sha256: str) -> bytes:
    """Return the snapshot's record that `checkpoints/<name>` has a copy of; empty if its phase is not over.

    Args:
        sha256: hash of the checkpoint's manifest.

    Raises:
        CheckpointError, RunError, StorageError: see `read_checkpoint`.
    """
    folder = storage.sub(f"{FOLDER}/{name}")
    hashes = _manifest(folder, sha256).sha256
    return _file(folder, SNAPSHOT, hashes[SNAPSHOT]) if SNAPSHOT in hashes else b""


def delete_checkpoints(storage: Storage, names: Sequence[str], kept: Mapping[str, str], objects: TensorObjects) -> None:
    """Delete checkpoints, and objects that only they name. Where a manifest cannot be read, objects stay.

    Args:
        kept: name -> SHA-256 of the manifest of those that stay.
    """
    try:
        ours = [_manifest(storage.sub(f"{FOLDER}/{name}")).objects for name in names]
        theirs = [_manifest(storage.sub(f"{FOLDER}/{name}"), sha256).objects for name, sha256 in kept.items()]
    except RunError:
        ours, theirs = [], []
    needed = {info.sha256 for checkpoint_objects in theirs for info in checkpoint_objects.values()}
    for name in names:
        storage.delete(f"{FOLDER}/{name}")
    objects.delete(
        [info for checkpoint_objects in ours for info in checkpoint_objects.values() if info.sha256 not in needed]
    )


def copy_checkpoint(source: Storage, folder: str, target: Storage, to: str, sha256: str) -> None:
    """Copy the checkpoint in `folder` with the objects that it names.

    Args:
        sha256: hash of its manifest.

    Raises:
        CheckpointError, RunError, StorageError: see `read_checkpoint`.
    """
    held = source.sub(folder)
    TensorObjects(source).copy(_manifest(held, sha256).objects.values(), target)
    for name in held.files():
        target.sub(to).write(name, held.read(name))


def _manifest(folder: Storage, sha256: str | None = None) -> _Manifest:
    _check_there(folder, MANIFEST)
    try:
        data, file = folder.read(MANIFEST, MAX_BYTES), f"{folder.uri}/{MANIFEST}"
        manifest = fields_of(unseal(data, file, FORMAT), file, _Manifest)
    except DamagedError as error:
        raise CheckpointError(str(error)) from error
    except FormatError as error:
        raise RunError(str(error)) from error
    if sha256 is not None and (there := hashlib.sha256(data).hexdigest()) != sha256:
        raise CheckpointError(
            f"'{file}' is of another checkpoint than the run wrote: its SHA-256 is {there[:12]}, expected "
            f"{sha256[:12]}: restore a copy"
        )
    return manifest


def _file(folder: Storage, file: str, sha256: str) -> bytes:
    _check_there(folder, file)
    data = folder.read(file)
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise CheckpointError(
            f"'{folder.uri}/{file}' is damaged: its SHA-256 is {digest[:12]}, expected {sha256[:12]}: restore a copy"
        )
    return data


def _check_there(folder: Storage, file: str) -> None:
    """Absent is damage, out of reach is not: only the former is a reason to use an older checkpoint."""
    if not folder.exists(file):
        raise CheckpointError(f"checkpoint '{folder.uri}' is incomplete: it has no {file}; restore a copy")


def write_model(storage: Storage | None, name: str, learned: Learned, model_files: dict[str, bytes]) -> None:
    """Export `learned/<name>`: a Hugging Face model folder with its label head.

    Collective where workers share weights out: one tensor at a time is gathered.

    Args:
        storage: None: another worker writes.
    """
    head = {key: whole(value) for key, value in learned.model.items() if key.startswith("head.")}
    body = {key: value for key, value in learned.model.items() if key not in head}
    folder = storage.sub(f"learned/{name}") if storage is not None else None
    if folder is not None and head:
        _write_packed(folder, "label_head.safetensors", lambda: packed(head, head.__getitem__))
        folder.write_json("labels.json", learned.labels)
    if folder is not None:
        for file, data in model_files.items():
            folder.write(file, data)
    is_shared = any(map(is_shared_out, body.values()))

    def fetch(key: str) -> Tensor:
        value = whole(body[key])
        return value if folder is not None else value.flatten()[:0]  # what another worker writes stays on the device

    parts = partial(packed, body, fetch, PYTORCH)
    if folder is not None:  # where weights are gathered nothing is retried: no other worker would gather them again
        _write_packed(folder.with_retries(0) if is_shared else folder, "model.safetensors", parts)
    for part in parts() if folder is None and is_shared else ():
        del part  # its memory may be freed before the next one is gathered
