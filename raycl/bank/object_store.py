"""The object-store cache: objects of a bank in Ray's object store, once per node, mapped by readers without copies.

Training workers, trials, the gate, routers and model replicas read adapters, routers and training states through it. A
named actor, the cache actor, reads each file of tensors once, checks its hash and puts its bytes into the object store;
readers get references and look at the shared memory itself. Objects die with their owner: when the cache actor or a
node is lost, the actor restarts empty and fills again from the bank, and a reader whose references are lost retries.
Mapped objects stay valid and unchanged. Readers read objects that a full object store does not take from the bank
themselves.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayTaskError,
)

from raycl.bank.bank import Bank, NamedObject
from raycl.bank.integrity import in_groups
from raycl.bank.manifest import ObjectInfo, Snapshot
from raycl.bank.tensors import unpack
from raycl.errors import BankError, RayclError
from raycl.storage import Storage
from raycl.storage.unfinished import Buffer
from raycl.types import AdapterState

T = TypeVar("T")
log: logging.Logger = logging.getLogger("raycl")

FULL = (ObjectStoreFullError, OutOfDiskError)
"""Ray's errors when an object fits neither in shared memory nor, spilled, on the node's disk."""

FULL_STORE = (
    "the object store is full, so %s of '%s' and others like it are read from the bank by each process: start Ray with "
    "a larger object_store_memory, or free the disk that it spills to"
)

PACK_BYTES, ALIGNMENT = 16 * 2**20, 64

NAMESPACE = "raycl"
"""The namespace of the cache actors, which are detached, so that every job of the cluster finds the same one."""

WAIT_S, LATER_S = 30.0, 1.0
"""Seconds to wait for objects on this node, and for further objects after the first that did not arrive."""

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before requests to the cache actor, which restarts within seconds when it or its node was lost."""


@dataclass(frozen=True)
class Location:
    """The location of an object's bytes: in a pack, from `start` on."""

    pack: Any
    start: int
    bytes: int


class CacheActor:
    """The cache actor: objects in packs, each an object of Ray; the least recently used pack is dropped when full.

    A pack holds objects that were requested together: thousands of small ones cost readers as little as a few.
    """

    def __init__(self, address: str, capacity: int) -> None:
        self.bank: Bank = Bank.at(address)
        self.capacity = capacity
        self.packs: OrderedDict[Any, dict[str, Location]] = OrderedDict()
        self.locations: dict[str, Location] = {}
        self.checked: set[str] = set()

    def locate(self, wanted: Sequence[NamedObject], lost: Sequence[str] = ()) -> tuple[list[Any], list[Any]]:
        """Return packs, and for each object its pack's number, start and size; None: there is no room for it.

        Args:
            lost: hashes whose objects the reader found gone.

        Raises:
            BankError: missing or damaged in the bank.
        """
        for pack in {self.locations[sha256].pack for sha256 in lost if sha256 in self.locations}:
            self._drop(pack)
        locations = self._located(wanted)
        for location in locations:
            if location is not None and location.pack in self.packs:
                self.packs.move_to_end(location.pack)
        self._make_room()
        packs = list(dict.fromkeys(location.pack for location in locations if location is not None))
        number = {pack: position for position, pack in enumerate(packs)}
        return packs, [location and (number[location.pack], location.start, location.bytes) for location in locations]

    def check(self, wanted: Sequence[NamedObject]) -> None:
        """Read objects that have not been read yet; they stay in the object store as long as there is room.

        Raises:
            BankError: missing or damaged in the bank.
        """
        size, fitting = self.held()[1], []
        for what, info in wanted:
            if info.sha256 in self.checked:
                continue
            if size + info.bytes <= self.capacity:
                size += info.bytes
                fitting.append((what, info))
            else:
                self._read(what, info)
        self._located(fitting)

    def _located(self, wanted: Sequence[NamedObject]) -> list[Location | None]:
        """Return the location of each; those that are not in the object store are read and packed."""
        fresh = {info.sha256: (what, info) for what, info in wanted if info.sha256 not in self.locations}
        locations = {info.sha256: self.locations.get(info.sha256) for _, info in wanted}
        for group in in_groups(list(fresh.values()), min(PACK_BYTES, self.capacity // 2)):
            locations |= self._pack(group)
        return [locations[info.sha256] for _, info in wanted]

    def _pack(self, group: Sequence[NamedObject]) -> dict[str, Location]:
        """Read objects into a new pack. Those before a damaged one are kept: they are not read again."""
        data = np.empty(sum(_aligned(info.bytes) for _, info in group), dtype=np.uint8)
        starts, end = {}, 0
        try:
            for what, info in group:
                data[end : end + info.bytes] = np.frombuffer(self._read(what, info), dtype=np.uint8)
                starts[info.sha256], end = (end, info.bytes), end + _aligned(info.bytes)
        finally:
            pack = self._put(data[:end]) if starts else None
            placed = {} if pack is None else {sha256: Location(pack, *location) for sha256, location in starts.items()}
            if placed:
                self.packs[pack] = placed
                self.locations |= placed
        return placed

    def _drop(self, pack: Any) -> None:
        for sha256 in self.packs.pop(pack, {}):
            del self.locations[sha256]

    def _make_room(self) -> None:
        while len(self.packs) > 1 and self.held()[1] > self.capacity:
            self._drop(next(iter(self.packs)))

    def _put(self, data: Any) -> Any:
        """Return a reference; where there is no room, the less recently used half goes first, and then there may be
        None."""
        try:
            return ray.put(data)
        except FULL:
            for pack in list(self.packs)[: len(self.packs) // 2]:
                self._drop(pack)
        try:
            return ray.put(data)
        except FULL:
            return None

    def _read(self, what: str, info: ObjectInfo) -> Buffer:
        data = self.bank.read_object(info, what)
        self.checked.add(info.sha256)
        return data

    def held(self) -> tuple[int, int]:
        """Return the number of objects and their bytes."""
        return len(self.locations), sum(location.bytes for location in self.locations.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class ObjectStoreCache:
    """A reader's view of a bank through the object store.

    Attributes:
        bank: the bank.
        name: name of the cache actor in `NAMESPACE`.
    """

    def __init__(self, bank: Bank, capacity_mb: float | None = None, detached: bool = True) -> None:
        """Find the bank's cache actor, or start it.

        Args:
            capacity_mb: limit of objects kept while unused; None: half of this cluster's object store. The
                first reader decides.
            detached: a cache actor that is started here outlives this job; otherwise it ends with its job, and other
                readers start another one.

        Raises:
            BankError: this process is not connected to a Ray cluster.
        """
        if not ray.is_initialized():
            raise BankError("the object-store cache needs a Ray cluster: call ray.init, or fetch from the bank itself")
        self.bank = bank
        self._said_full = False
        self._wait_s = WAIT_S
        self.name: str = "adapter-cache-" + hashlib.sha256(bank.storage.address.encode()).hexdigest()[:16]
        self.capacity: int = int(
            capacity_mb * 2**20 if capacity_mb else ray.cluster_resources()["object_store_memory"] / 2
        )
        self._options = {"lifetime": "detached"} if detached else {}
        self._closed = False
        self._actor = self._open()

    def _open(self) -> Any:
        return (
            ray.remote(CacheActor)
            .options(
                name=self.name,
                namespace=NAMESPACE,
                get_if_exists=True,
                max_restarts=-1,
                max_task_retries=len(PAUSES_S),
                num_cpus=0,
                **self._options,
            )
            .remote(self.bank.storage.address, self.capacity)
        )

    def fetch(self, snapshot: Snapshot, names: Sequence[str]) -> Callable[[str], AdapterState]:
        """Map adapters of a snapshot into this process, and return a function from the name of one to its state.

        The tensors look into the node's shared memory and are read-only; it stays mapped while anything refers to it.

        Raises:
            BankError: missing or damaged in the bank, or the cache actor keeps failing.
        """
        entries = [snapshot.adapter(name) for name in names]
        buffers = self.read_objects([(str(entry), entry.tensors) for entry in entries])
        mapped = {entry.name: (entry, buffer) for entry, buffer in zip(entries, buffers, strict=True)}

        def unpacked(name: str) -> AdapterState:
            entry, buffer = mapped[name]
            return unpack(buffer, entry, snapshot.layouts[entry.layout])

        return unpacked

    def source(self, snapshot: Snapshot) -> Callable[[str], AdapterState]:
        """Return a function from the name of an adapter to its state.

        All adapters are requested at once when the first one is needed, if the cache can keep them; otherwise every
        reader would read them into memory of its own, so each is requested when it is needed.
        """
        if sum(entry.tensors.bytes for entry in snapshot.adapters) > self.capacity:
            return lambda name: self.fetch(snapshot, [name])(name)
        at_once = cache(lambda: self.fetch(snapshot, [entry.name for entry in snapshot.adapters]))
        return lambda name: at_once()(name)

    def check(self, wanted: Sequence[NamedObject]) -> None:
        """Check objects; the cache actor reads each once.

        Raises:
            BankError: missing or damaged in the bank, or the cache actor keeps failing.
        """
        self._with_retries(lambda lost: ray.get(self._actor.check.remote(wanted)), [])

    def read_objects(self, wanted: Sequence[NamedObject]) -> list[Buffer]:
        """Return the bytes of each object, mapped and read-only; one request to the cache actor.

        Raises:
            BankError: missing or damaged in the bank, or the cache actor keeps failing.
        """
        wanted = list(wanted)

        def read(lost: list[str]) -> list[Buffer]:
            packs, locations = ray.get(self._actor.locate.remote(wanted, lost))
            local = self._local(packs)
            mapped = [memoryview(local[pack]) if pack in local else None for pack in packs]
            buffers: list[Buffer] = []
            for location, (what, info) in zip(locations, wanted, strict=True):
                number, start, size = location or (None, 0, 0)
                pack = None if number is None else mapped[number]
                if pack is None and not self._said_full:
                    self._said_full = True
                    log.warning(FULL_STORE, what, self.bank.storage.uri)
                found = self.bank.read_object(info, what) if pack is None else pack[start : start + size]
                buffers.append(found)
            return buffers

        return self._with_retries(read, [info.sha256 for _, info in wanted])

    def _local(self, references: list[Any]) -> dict[Any, Buffer]:
        """Return what this node's object store has, or gets in time: the wait for a spilled object may never end."""
        if not references:
            return {}
        named = list(dict.fromkeys(references))
        ready, late = ray.wait(named, num_returns=len(named), timeout=self._wait_s)
        if late:
            self._wait_s = LATER_S
        try:
            return dict(zip(ready, ray.get(ready, timeout=WAIT_S), strict=True))
        except (*FULL, GetTimeoutError):
            return {}

    def _with_retries(self, read: Callable[[list[str]], T], wanted: list[str]) -> T:
        """Return the cache actor's answer; `read` is called again with the hashes whose objects were lost meanwhile."""
        if self._closed:
            raise BankError(f"the object-store cache of '{self.bank.storage.uri}' is closed: open it again")
        lost: list[str] = []
        for pause in PAUSES_S:
            time.sleep(pause)
            try:
                return read(lost)
            except ObjectLostError:
                lost = wanted
            except ActorUnavailableError:
                lost = []  # it is being restarted, and will be empty
            except RayTaskError as error:
                if isinstance(error.cause, RayclError):
                    raise type(error.cause)(*error.cause.args) from None
                raise BankError(
                    f"the object-store cache of '{self.bank.storage.uri}' cannot read it: {error.cause}"
                ) from error
            except RayActorError:
                lost = []
                self._actor = self._open()  # the job that started it has ended, or another reader closed it
        raise BankError(
            f"the object-store cache of '{self.bank.storage.uri}' was lost {len(PAUSES_S)} times in a row: look at "
            "the cluster's nodes, or fetch from the bank itself"
        )

    def held(self) -> tuple[int, int]:
        """Return the number of objects that the cache actor holds, and their bytes."""
        count, size = ray.get(self._actor.held.remote())
        return int(count), int(size)

    def close(self) -> None:
        """End the cache actor; other readers start another one. Mapped objects stay valid."""
        self._closed = True
        ray.kill(self._actor)


def shared_readers() -> Callable[[Storage], ObjectStoreCache]:
    """Return a function that opens readers of banks and runs once each; cache actors that it starts end with it."""

    @cache
    def opened(address: str) -> ObjectStoreCache:
        return ObjectStoreCache(Bank.at(address), detached=False)

    return lambda storage: opened(storage.address)
