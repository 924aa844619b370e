"""The data that a snapshot was trained on, as its record describes it and as the user allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycl import config as configs
from raycl.bank import Snapshot
from raycl.config import Tree
from raycl.config.addresses import addresses, require_named
from raycl.errors import BankError


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
