"""A snapshot as a model: routed, mixed and answered by the same layers as in training.

What it does not know: which method learned the snapshot, where requests come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raycl.adapters import AdapterStack
from raycl.adapters.head import MixedHead
from raycl.adapters.prompts import MixedPrompts
from raycl.adapters.stack import Source
from raycl.backbone import Backbone
from raycl.bank import Bank, Snapshot
from raycl.bank.routers import get_router
from raycl.errors import BankError
from raycl.retrieval.router import Router, make_router
from raycl.types import Activation, Batch


class SnapshotModel:
    """Answers texts with a snapshot's adapters.

    Attributes:
        stack: the adapters over the backbone's linears, brought to the device when a mixture names them.
    """

    def __init__(
        self, backbone: Backbone, snapshot: Snapshot, source: Source, router: Router, resident_rows: int | None = None
    ) -> None:
        """Put the snapshot's adapters over `backbone`, which from now on speaks through them alone.

        Args:
            source: name of an adapter -> what it holds (`adapters_of`, or a shelf).
            router: of the snapshot (`router_of`).
            resident_rows: ranks of adapters on the device at once; None: as many as are asked for.

        Raises:
            BankError: adapters of different activations.
        """
        activation = activation_of(snapshot)
        paths = sorted({path for layout in snapshot.layouts.values() for path in layout})
        self.backbone = backbone.eval()
        self.snapshot = snapshot
        self.stack = AdapterStack(backbone.model, paths, resident_rows, source, activation)
        width = int(backbone.model.get_input_embeddings().weight.shape[1])
        if backbone.codec.needs_labels:
            backbone.head = MixedHead(self.stack, int(backbone.model.config.hidden_size))
        if any(entry.prompt for entry in snapshot.adapters):
            backbone.prefix = MixedPrompts(self.stack, width)
        self.router = router

    def predict(self, batch: Batch, texts: Sequence[str], tasks: Sequence[str] | None, limit: int) -> list[str]:
        """One answer per example.

        Args:
            texts: what is routed, one per example. tasks: where they are known.
            limit: tokens of a generated answer.

        Raises:
            BankError: the router needs what is not given, or an adapter is damaged.
        """
        with self.stack.mixing(self.router.route(texts, tasks)):
            return self.backbone.predict(batch, limit)


def activation_of(snapshot: Snapshot) -> Activation:
    """The one activation of the snapshot's adapters; those of a head or a prompt alone have none and need none.

    Raises:
        BankError: there are several.
    """
    example = {entry.activation: entry for entry in snapshot.adapters if entry.rank}
    if len(example) > 1:
        kinds = ", ".join(f"'{kind or 'none'}' ({example[kind]})" for kind in sorted(example))
        raise BankError(
            f"the adapters of snapshot {snapshot.number} have activations {kinds}, but a model computes all of its "
            "adapters with one: make a snapshot for each"
        )
    return next(iter(example), "")


def router_of(bank: Bank, snapshot: Snapshot, cache: Path | None = None) -> Router:
    """The snapshot's router.

    Raises:
        BankError: damaged, or of a kind that this version does not know. RetrievalError: another sentence encoder.
    """
    owners = {entry.name: entry.tasks for entry in snapshot.adapters}
    return make_router(get_router(bank, snapshot), owners, cache)


def adapters_of(bank: Bank, snapshot: Snapshot) -> Source:
    """Fetches a snapshot's adapters from the bank itself."""
    entries = {entry.name: entry for entry in snapshot.adapters}
    return lambda name: bank.fetch(entries[name], snapshot.layouts[entries[name].layout])
