"""The snapshot that should answer, by the bank and the decisions for the endpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raycl.bank import Bank, Snapshot
from raycl.bank.activations import Activations
from raycl.bank.branches import missing_branch
from raycl.errors import BankError, StorageError
from raycl.serve.settings import ServeConfig

log = logging.getLogger(__name__)


def wanted_snapshots(bank: Bank, activations: Activations, config: ServeConfig) -> list[int]:
    """Return numbers of the snapshots that may answer, the best first: the others are for when it is not whole.

    With `follow` and no gate, what the branch moved to after the last decision comes first; else the decided one does.

    Raises:
        BankError: the branch does not exist, or the last decision is damaged.
    """
    last = activations.latest()
    follows = config.follow.enabled and not config.follow.gated
    if last is not None and not follows:
        return [last.snapshot]
    newer = list(activations.branch.newest_first(after=0 if last is None else last.seen))
    if last is not None:
        return newer if last.snapshot in newer else [*newer, last.snapshot]
    if not newer:
        raise missing_branch(bank, config.branch)
    return newer


def readable_snapshot(bank: Bank, numbers: Sequence[int]) -> Snapshot:
    """Return the first whose record can be read; no tensors are.

    Raises:
        BankError: why the first one cannot, if none can.
    """
    first: BankError | None = None
    for number in numbers:
        try:
            return bank.open(number)
        except BankError as error:
            first = first or error
    assert first is not None, "there is at least one number"
    raise first


def decide_first(bank: Bank, config: ServeConfig) -> int:
    """Write down what answers when an endpoint starts: as configured, as decided before, or the newest.

    The newest is a decision only where nothing is followed: else every replica takes the newest that is whole.

    Raises:
        BankError: the bank is empty, or has no such snapshot.
    """
    activations = Activations(bank, config.branch)
    try:
        last = activations.latest()
    except BankError:
        if config.snapshot is None:
            raise
        last = None  # the new decision repairs it
    wanted = config.snapshot or wanted_snapshots(bank, activations, config)[0]
    if last is None or (config.snapshot is not None and last.snapshot != wanted):
        follows = config.follow.enabled and not config.follow.gated
        seen = 0 if follows and config.snapshot is None else None
        try:
            activations.add(wanted, "start", seen)
        except StorageError as error:
            log.warning("the bank cannot be written, so replicas agree only while nothing is published: %s", error)
    return wanted
