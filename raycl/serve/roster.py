"""The snapshots that a replica can answer from: opened in the background, taken on between two batches.

A request keeps the snapshot that it began with. The active one is what the bank's activations say; in follow mode
without a gate, what was published since the last decision counts as activated.
What it does not know: requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict

from raycl.adapters.stack import Source
from raycl.bank import Bank, Snapshot
from raycl.bank.activations import Activations
from raycl.bank.shelf import Shelf
from raycl.errors import BankError, RayclError, StorageError
from raycl.retrieval.router import Router, TextRouter
from raycl.serve.asks import FAILURES
from raycl.serve.engine import Engine
from raycl.serve.host import Hosted
from raycl.serve.model import router_of
from raycl.serve.settings import ServeConfig
from raycl.serve.split import RemoteEngine

log = logging.getLogger(__name__)


class Roster:
    """Snapshots of one bank on one engine.

    Attributes:
        active: answers from now on.
        problem: why the newest decision could not be followed, "" if it could.
    """

    def __init__(
        self, bank: Bank, engine: Engine | RemoteEngine, config: ServeConfig, identity: str, shelf: Shelf | None
    ) -> None:
        """Open the first snapshot.

        Args:
            identity: SHA-256 of the backbone.
            shelf: adapters come from the cluster's object store; None: from the bank itself.

        Raises:
            BankError: there is none, or it was made for another backbone.
        """
        self.bank, self.engine, self.config = bank, engine, config
        self.activations = Activations(bank)
        self.problem = ""
        self._identity, self._shelf = identity, shelf
        self._open: OrderedDict[int, Hosted] = OrderedDict()
        self._users: Counter[int] = Counter()
        self._lock = threading.Lock()  # of those two and of what is active: held for a moment only
        self._changing = threading.RLock()  # one snapshot is opened, activated or let go at a time; that may take long
        self._stopped = threading.Event()
        self.active = self._load(wanted_snapshot(bank, self.activations, config))
        self.active_since = time.time()
        self._thread = threading.Thread(target=self._watch, name="raycl-follow", daemon=True)
        self._thread.start()

    def open(self, number: int) -> Hosted:
        """A snapshot ready to answer; blocks while it is loaded.

        Raises:
            BankError: unknown, damaged, or made for another backbone.
        """
        with self._changing:
            with self._lock:
                hosted = self._open.get(number)
            if hosted is None:
                hosted = self._load(number)
                self._make_room(number)
            return hosted

    def _load(self, number: int) -> Hosted:
        snapshot = self.bank.open(number)
        self._check(snapshot)
        hosted = Hosted.of(snapshot, self._router(snapshot), self._source(snapshot))
        self.engine.take_on(hosted)
        with self._lock:
            self._open[number] = hosted
        return hosted

    def _router(self, snapshot: Snapshot) -> Router:
        """Routers that read texts share one sentence encoder, which is loaded once."""
        router = router_of(self.bank, snapshot)
        with self._lock:
            others = [hosted.router for hosted in self._open.values()]
        for other in others:
            if isinstance(router, TextRouter) and isinstance(other, TextRouter):
                mine, its = router.encoder, other.encoder
                if (mine.config, mine.fingerprint) == (its.config, its.fingerprint):
                    router.encoder = its
        return router

    def _check(self, snapshot: Snapshot) -> None:
        if snapshot.backbone.sha256 != self._identity:
            raise BankError(
                f"snapshot {snapshot.number} was made for backbone '{snapshot.backbone.name}' "
                f"({snapshot.backbone.sha256[:12]}), this endpoint runs another ({self._identity[:12]})"
            )

    def _source(self, snapshot: Snapshot) -> Source:
        if self._shelf is None:
            entries = {entry.name: entry for entry in snapshot.adapters}
            return lambda name: self.bank.fetch(entries[name], snapshot.layouts[entries[name].layout])
        shelf = self._shelf
        return lambda name: shelf.fetch(snapshot, [name])[name]

    def _make_room(self, fresh: int | None = None) -> None:
        """Let go of snapshots that nobody uses, the least recently used first."""
        with self._lock:
            kept = (fresh, self.active.snapshot.number)
            spare = [number for number in self._open if not self._users[number] and number not in kept]
            gone = spare[: max(0, len(self._open) - self.config.hosted)]
            for number in gone:
                del self._open[number]
        for number in gone:
            self.engine.let_go(number)

    def at_hand(self, number: int | None = None) -> Hosted | None:
        """As `take`, without waiting: None if the snapshot is not open."""
        with self._lock:
            hosted = self.active if number is None else self._open.get(number)
            if hosted is not None:
                self._open.move_to_end(hosted.snapshot.number)
                self._users[hosted.snapshot.number] += 1
            return hosted

    def take(self, number: int | None = None) -> Hosted:
        """A snapshot for one answer, kept until `give_back`; None: the active one. Blocks while it is loaded.

        Raises:
            BankError: see `open`.
        """
        hosted = self.at_hand(number)
        if hosted is not None:
            return hosted
        assert number is not None, "the active one is always there"
        with self._changing:  # nobody lets go of it meanwhile
            hosted = self.open(number)
            with self._lock:
                self._users[number] += 1
            return hosted

    def give_back(self, hosted: Hosted) -> None:
        """The answer is finished."""
        with self._lock:
            self._users[hosted.snapshot.number] -= 1

    @property
    def decision(self) -> dict[str, object]:
        """The last one: number, snapshot, and why."""
        last = self.activations.latest()
        return {} if last is None else {"number": last.number, "snapshot": last.snapshot, **last.made}

    # ---- following -------------------------------------------------------------------------------------------

    def activate(self, number: int, why: str) -> None:
        """Decide for a snapshot, for every replica; this one has it when this returns.

        Raises:
            BankError: see `open`.
        """
        with self._changing:
            self.open(number)
            self.activations.add(number, why)
            self.refresh()

    def refresh(self) -> None:
        """Do what the bank says now.

        Raises:
            BankError: see `open`.
        """
        with self._changing:
            wanted = wanted_snapshot(self.bank, self.activations, self.config)
            if wanted == self.active.snapshot.number:
                return
            hosted = self.open(wanted)
            with self._lock:
                self.active, self.active_since = hosted, time.time()
            self._make_room()
            log.info("snapshot %d answers", wanted)

    def _watch(self) -> None:
        while not self._stopped.wait(self.config.follow.poll_s):
            try:
                self.refresh()
                self.problem = ""
            except RayclError as error:
                if str(error) != self.problem:
                    log.error("the new snapshot cannot be used, the old one goes on: %s", error)
                self.problem = str(error)
            except FAILURES as error:  # a bank that cannot be reached for a while ends no server
                log.warning("the bank cannot be looked at now: %s", error)

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join(timeout=30)


def wanted_snapshot(bank: Bank, activations: Activations, config: ServeConfig) -> int:
    """Number of the snapshot that should answer.

    Raises:
        BankError: the bank is empty.
    """
    last = activations.latest()
    follows = config.follow.enabled and not config.follow.gated
    if last is not None and not follows:
        return last.snapshot
    numbers = bank.snapshots()
    if not numbers:
        raise BankError(f"the bank {bank.storage.uri} has no snapshot yet: train a stream into it first")
    return max(numbers) if last is None or max(numbers) > last.seen else last.snapshot


def decide_first(bank: Bank, config: ServeConfig) -> int:
    """Write down what answers when an endpoint starts: as configured, as decided before, or the newest.

    Raises:
        BankError: the bank is empty, or has no such snapshot.
    """
    activations = Activations(bank)
    last = activations.latest()
    wanted = config.snapshot or wanted_snapshot(bank, activations, config)
    if last is None or (config.snapshot is not None and last.snapshot != wanted):
        try:
            activations.add(wanted, "start")
        except StorageError as error:
            log.warning("the bank cannot be written, so replicas agree only while nothing is published: %s", error)
    return wanted
