"""Snapshots of a bank: the one that should answer, and the parts of an open one: backbone, router, adapters, data."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raycl import config as configs
from raycl.adapters.stack import Source
from raycl.backbone import BackboneConfig, identity
from raycl.bank import Bank, Snapshot
from raycl.bank.activations import Activations
from raycl.bank.bank import ObjectReader
from raycl.bank.branches import missing_branch
from raycl.bank.states import get_router
from raycl.config import Tree
from raycl.config.trust import NONE_GIVEN, RISKS, Permissions, addresses, require_named
from raycl.errors import BankError, StorageError
from raycl.routing.router import Router
from raycl.routing.routers import make_router
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.serve.settings import ServeConfig

log: logging.Logger = logging.getLogger(__name__)


def backbone_of(snapshot: Snapshot, given: str | None = None, permissions: Permissions = NONE_GIVEN) -> BackboneConfig:
    """Return how to load the snapshot's backbone: as its run did, or from `given`.

    Args:
        permissions: code that the snapshot's author may run here; for a snapshot without a run they are used unchanged.

    Raises:
        BankError: it needs more than that, or the model found there is another one.
    """
    unrecorded = {"name": snapshot.backbone.name, **asdict(permissions)}
    settings: dict[str, Any] = dict(snapshot.provenance.get("config", {}).get("backbone", unrecorded))
    _require(permissions, settings, f"snapshot {snapshot.number} was made with backbone")
    config = BackboneConfig(**{**settings, **({"name": given} if given else {})})
    digest = identity(config)
    if digest != snapshot.backbone.sha256:
        raise BankError(
            f"snapshot {snapshot.number} was made with backbone '{snapshot.backbone.name}' "
            f"({snapshot.backbone.sha256[:12]}), '{config.name}' is another model ({digest[:12]}): name the right one"
        )
    return config


def _require(permissions: Permissions, settings: Mapping[str, Any], made_with: str) -> None:
    for name in permissions.refused(name for name in RISKS if settings.get(name)):
        raise BankError(
            f"{made_with}.{name}=true, which {RISKS[name]}: a bank cannot allow that; if you trust its author, allow "
            f"it with {name}=true (raycl bank: --{name.replace('_', '-')})"
        )


def router_of(
    reader: ObjectReader,
    snapshot: Snapshot,
    permissions: Permissions = NONE_GIVEN,
    encoders: Sequence[SentenceEncoder] = (),
) -> Router:
    """Return the snapshot's router, its tensors read by `reader`.

    Args:
        permissions: code that the snapshot's author may run here.
        encoders: those that are loaded; the router's own is used if it is among them.

    Raises:
        BankError: damaged, of a kind that this version does not know, or it needs more than the permissions.
        RetrievalError: another sentence encoder.
    """
    owners = {entry.name: entry.tasks for entry in snapshot.adapters}
    state = get_router(reader, snapshot)
    _require(permissions, state.encoder or {}, f"the router of snapshot {snapshot.number} was made with encoder")
    return make_router(state, owners, encoders)


def adapters_of(bank: Bank, snapshot: Snapshot) -> Source:
    """Fetch a snapshot's adapters from the bank itself."""
    entries = {entry.name: entry for entry in snapshot.adapters}
    return lambda name: bank.fetch(entries[name], snapshot.layouts[entries[name].layout])


def recorded_data(
    snapshot: Snapshot, bank: str, overrides: Sequence[str], allowed: Sequence[str], setting: str
) -> tuple[Tree, int]:
    """Return the sections `stream` and `eval` of the run that made a snapshot, and its seed.

    Args:
        bank: its address. overrides: overrides of these sections, for data that has moved.
        allowed: addresses of storage that the record may name besides the bank's. setting: the setting that names them.

    Raises:
        BankError: the snapshot does not record it. ConfigError: it names storage that the user does not.
    """
    recorded: dict[str, Any] = snapshot.provenance.get("config") or {}
    if "seed" not in recorded:
        raise BankError(f"snapshot {snapshot.number} has no record of its training data: it cannot be evaluated")
    tree = {name: dict(recorded.get(name, {})) for name in ("stream", "eval")}
    tree["stream"] |= {"unseen": None, "cache_dir": None}
    given: Tree = {}
    for override in overrides:
        configs.apply_override(tree, override)
        configs.apply_override(given, override)
    known = [bank, *allowed, *addresses(given).values()]
    require_named(tree, known, f"snapshot {snapshot.number} of '{bank}'", setting)
    return tree, int(recorded["seed"])


# ---- the snapshot that answers -----------------------------------------------------------------------------------


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
