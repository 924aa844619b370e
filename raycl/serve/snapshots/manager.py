"""The snapshots that a replica can answer from: loaded in the background, added between two batches.

A request keeps the snapshot that it began with. The active one follows the bank's activations; in follow mode without a
gate, what was published since the last decision counts as activated.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from raycl.bank import Bank, Snapshot
from raycl.bank.activations import Activation, Activations
from raycl.bank.integrity import IntegrityCheck
from raycl.bank.object_store import ObjectStoreCache
from raycl.errors import BankError, RayclError
from raycl.serve.engine.engine_requests import FAILURES
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, mark_of, rule_of
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.serve.errors import UnavailableError
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import adapters_of, router_of, wanted_snapshots
from raycl.storage.records import Stamp

log: logging.Logger = logging.getLogger(__name__)


DECISIONS = 8
"""Decisions that the endpoint lists."""

LONGEST_S = 30.0
"""The longest time between two looks at a snapshot that could not be used."""


@dataclass(frozen=True)
class FailedSnapshot:
    """A snapshot that could not be used.

    Attributes:
        pause_s: seconds until it is checked again. until: end of the pause on the monotonic clock.
    """

    error: RayclError
    pause_s: float
    until: float


class SnapshotManager:
    """Snapshots of one bank on one engine.

    Attributes:
        active: answers from now on.
        problem: why what should answer now does not, "" if it does.
        rejection: why the gate did not let the newest answer, "" if it did.
    """

    def __init__(
        self,
        bank: Bank,
        engine: ServingEngine,
        config: ServeConfig,
        identity: str,
        object_store_cache: ObjectStoreCache | None,
    ) -> None:
        """Open the first snapshot that is whole, of those that may answer.

        Args:
            identity: SHA-256 of the backbone.
            object_store_cache: adapters and routers come from the cluster's object store; None: from the bank itself.

        Raises:
            BankError: there is none, or all are damaged or were made for another backbone.
        """
        self.bank = bank
        self.engine = engine
        self.config = config
        self.activations: Activations = Activations(bank, config.branch)
        self.problem: str = ""
        self.rejection: str = ""
        self._identity, self._cache = identity, object_store_cache
        self._integrity = (
            IntegrityCheck.of(bank) if object_store_cache is None else IntegrityCheck(object_store_cache.check)
        )
        self._failed: dict[int, FailedSnapshot] = {}
        self._open: OrderedDict[int, LoadedSnapshot] = OrderedDict()
        self._replaced: list[LoadedSnapshot] = []  # whose number means another snapshot now, or none
        self._stamps: dict[int, Stamp] = {}
        self._decisions: list[dict[str, object]] = []
        self._decisions_until: Activation | None = None
        self._users: Counter[LoadedSnapshot] = Counter()
        self._lock = threading.Lock()  # of these and of what is active: held for a moment only
        self._loading_lock = threading.RLock()  # held while a snapshot is loaded, activated or unloaded
        self._stopped = threading.Event()
        self.active, error = self._best(wanted_snapshots(bank, self.activations, config))
        self._report_problem(error)
        self.active_since: float = time.time()
        self._thread = threading.Thread(target=self._watch, name="raycl-follow", daemon=True)
        self._thread.start()

    def open(self, number: int, check: bool = False) -> LoadedSnapshot:
        """Return a snapshot ready to answer; blocks while it is loaded.

        Args:
            check: all its objects are read and checked before.

        Raises:
            BankError: unknown, damaged, or made for another backbone.
        """
        with self._loading_lock:
            loaded = self._opened(number)
            snapshot, stamp = (loaded.snapshot, None) if loaded is not None else self._read(number)
            if check:
                self._integrity.check(snapshot)
            return loaded or self._load(snapshot, stamp)

    def _opened(self, number: int) -> LoadedSnapshot | None:
        with self._lock:
            return self._open.get(number)

    def _read(self, number: int) -> tuple[Snapshot, Stamp | None]:
        """Return a record, read once since it may be large, and its stamp before that."""
        stamp = self.bank.stamps().get(number)
        return self.bank.open(number), stamp

    def _load(self, snapshot: Snapshot, stamp: Stamp | None) -> LoadedSnapshot:
        if snapshot.backbone.sha256 != self._identity:
            raise BankError(
                f"snapshot {snapshot.number} was made for backbone '{snapshot.backbone.name}' "
                f"({snapshot.backbone.sha256[:12]}), this endpoint runs another ({self._identity[:12]})"
            )
        with self._lock:
            mark = mark_of(snapshot, [*self._open.values(), *self._replaced])
            encoders = [loaded.router.encoder for loaded in self._open.values() if loaded.router.encoder is not None]
        # routers that read texts share one sentence encoder, which is loaded once
        router = router_of(self._cache or self.bank, snapshot, self.config.permissions, encoders)
        source = adapters_of(self.bank, snapshot) if self._cache is None else self._cache.source(snapshot)
        rule = rule_of(snapshot, router, self.config.unknown, self.config.false_alarms)
        loaded = LoadedSnapshot.of(snapshot, router, source, mark, rule)
        self.engine.load_snapshot(loaded)
        with self._lock:
            self._open[snapshot.number] = loaded
            if stamp is not None:
                self._stamps[snapshot.number] = stamp
        self._make_room(snapshot.number)
        return loaded

    def _make_room(self, fresh: int | None = None) -> None:
        """Unload snapshots that are not in use, the least recently used first."""
        with self._lock:
            gone = [loaded for loaded in self._replaced if not self._users[loaded] and loaded is not self.active]
            self._replaced = [loaded for loaded in self._replaced if loaded not in gone]
            if len(self._open) > self.config.loaded_snapshots:
                kept = (fresh, self.active.snapshot.number)
                spare = [n for n, loaded in self._open.items() if not self._users[loaded] and n not in kept]
                gone += [self._open.pop(n) for n in spare[: len(self._open) - self.config.loaded_snapshots]]
            for loaded in gone:
                self._users.pop(loaded, None)
        for loaded in gone:
            self.engine.unload_snapshot(loaded)

    def _drop_replaced(self) -> None:
        """Set aside snapshots whose number is gone from the bank, or names another snapshot now."""
        stamps = self.bank.stamps()
        for number, loaded in list(self._open.items()):
            stamp = stamps.get(number)
            if stamp is not None and (stamp == self._stamps.get(number) or self._is_unchanged(loaded)):
                self._stamps[number] = stamp
                continue
            with self._lock:
                self._replaced.append(self._open.pop(number))
            self._failed.pop(number, None)
            log.warning("snapshot %d was removed from the bank%s", number, "" if stamp is None else " and recreated")

    def _is_unchanged(self, loaded: LoadedSnapshot) -> bool:
        """Return whether its record is unchanged; one that cannot be read now counts as unchanged."""
        try:
            return self.bank.open(loaded.snapshot.number) == loaded.snapshot
        except BankError:
            return True

    def acquire_if_loaded(self, number: int | None = None) -> LoadedSnapshot | None:
        """Acquire a snapshot without waiting; None if it is not open."""
        with self._lock:
            loaded = self.active if number is None else self._open.get(number)
            if loaded is not None:
                if self._open.get(loaded.snapshot.number) is loaded:
                    self._open.move_to_end(loaded.snapshot.number)
                self._users[loaded] += 1
            return loaded

    def acquire(self, number: int | None = None) -> LoadedSnapshot:
        """Return a snapshot for one answer, kept until `release`; None: the active one. Blocks while it is loaded.

        Raises:
            BankError: see `open`.
        """
        loaded = self.acquire_if_loaded(number)
        if loaded is not None:
            return loaded
        assert number is not None, "the active one is always there"
        with self._loading_lock:  # it is not unloaded meanwhile
            loaded = self.open(number)
            with self._lock:
                self._users[loaded] += 1
            return loaded

    def release(self, loaded: LoadedSnapshot) -> None:
        """Release a snapshot when its answer is finished."""
        with self._lock:
            self._users[loaded] -= 1

    @property
    def decision(self) -> dict[str, object]:
        """The last one: number, snapshot, and why."""
        last = self.activations.latest()
        return {} if last is None else {"number": last.number, "snapshot": last.snapshot, **last.provenance}

    @property
    def decisions(self) -> list[dict[str, object]]:
        """The last few, the newest first, as `decision`; read again only after a new one."""
        last = self.activations.latest()
        if last is not None and last != self._decisions_until:
            recent = self.activations.recent(DECISIONS)
            self._decisions = [{"number": one.number, "snapshot": one.snapshot, **one.provenance} for one in recent]
            self._decisions_until = last
        return self._decisions

    # ---- following -------------------------------------------------------------------------------------------

    def activate(self, number: int, why: str) -> None:
        """Decide for a snapshot, for every replica; this one has it when this returns.

        Raises:
            BankError: see `open`. UnavailableError: it is not whole; nothing is decided.
        """
        with self._loading_lock:
            self._drop_replaced()
            loaded = self._opened(number)
            snapshot, stamp = (loaded.snapshot, None) if loaded is not None else self._read(number)
            try:
                self._integrity.check(snapshot)
            except BankError as error:
                raise UnavailableError(f"snapshot {number} is not activated: {error}") from error
            if loaded is None:
                self._load(snapshot, stamp)
            self.activations.add(snapshot, why)
            self._failed.pop(number, None)
            self._follow()

    def _follow(self) -> RayclError | None:
        """Change to what should answer, or to the best of what can; why not the former, if so."""
        with self._loading_lock:
            self._drop_replaced()
            if self._replaced:
                self._make_room()
            wanted = wanted_snapshots(self.bank, self.activations, self.config)
            if self.config.gates:
                last = self.activations.latest()
                self.rejection = "" if last is None else last.rejection
            self._failed = {number: failed for number, failed in self._failed.items() if number in wanted}
            now = self.active.snapshot.number
            current = now in wanted and self._open.get(now) is self.active
            newer = wanted[: wanted.index(now)] if current else wanted
            if not newer:
                return None
            try:
                loaded, error = self._best(newer)
            except RayclError as none:
                return none
            with self._lock:
                self.active = loaded
                self.active_since = time.time()
            self._make_room()
            log.info("snapshot %d is active", loaded.snapshot.number)
            return error

    def _best(self, numbers: Sequence[int]) -> tuple[LoadedSnapshot, RayclError | None]:
        """Return the first that is whole and can be opened, and why none before it.

        One that failed is read again after a pause that grows: it may be large, and be repaired never.

        Raises:
            RayclError: why the first one cannot answer, if none can.
        """
        first: RayclError | None = None
        for number in numbers:
            failed = self._failed.get(number)
            if failed is None or time.monotonic() >= failed.until:
                try:
                    loaded = self.open(number, check=True)
                except RayclError as error:
                    pause = self.config.follow.poll_s if failed is None else min(2 * failed.pause_s, LONGEST_S)
                    failed = self._failed[number] = FailedSnapshot(error, pause, time.monotonic() + pause)
                else:
                    self._failed.pop(number, None)
                    return loaded, first
            first = first or failed.error
        assert first is not None, "there is at least one number"
        raise first

    def _watch(self) -> None:
        while not self._stopped.wait(self.config.follow.poll_s):
            try:
                self._report_problem(self._follow())
            except RayclError as error:
                self._report_problem(error)
            except FAILURES as error:  # a bank that cannot be reached for a while ends no server
                log.warning("the bank cannot be read now: %s", error)

    def _report_problem(self, error: RayclError | None) -> None:
        """Keep the problem, and log it once."""
        message = "" if error is None else str(error)
        if message and message != self.problem:
            log.error("the new snapshot cannot be used, an older one stays active: %s", message)
        self.problem = message

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=30)
