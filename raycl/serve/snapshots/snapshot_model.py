"""A snapshot as a model: routed, mixed and answered by the same layers as in training.

What it does not know: which method learned the snapshot, where requests come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raycl.adapters.stack import Source
from raycl.backbone import Backbone, BackboneConfig, identity
from raycl.bank import Bank, Snapshot
from raycl.bank.bank import ObjectReader
from raycl.bank.routers import get_router
from raycl.config.trust import NONE_GIVEN, RISKS, Permissions
from raycl.errors import BankError
from raycl.generation.answers import predict
from raycl.retrieval.encoder import SentenceEncoder
from raycl.retrieval.router import Router
from raycl.retrieval.routers import make_router
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, MultiSnapshotModel
from raycl.types import Batch, Mixture


class SnapshotModel:
    """Answers texts with a snapshot's adapters."""

    def __init__(
        self, backbone: Backbone, snapshot: Snapshot, source: Source, router: Router, max_loaded_rows: int | None = None
    ) -> None:
        """Attach the snapshot's adapters to `backbone`.

        Args:
            source: name of an adapter -> what it holds (`adapters_of`, or an object-store cache).
            router: of the snapshot (`router_of`).
            max_loaded_rows: ranks of adapters on the device at once; None: no limit.

        Raises:
            BankError: see `MultiSnapshotModel.add`.
        """
        self.backbone, self.snapshot, self.router = backbone, snapshot, router
        self.model = MultiSnapshotModel(backbone, max_loaded_rows)
        self.loaded = LoadedSnapshot.of(snapshot, router, source)
        self.model.add(self.loaded)

    def predict(
        self,
        batch: Batch,
        texts: Sequence[str],
        tasks: Sequence[str] | None,
        limit: int,
        is_chat: bool = False,
        alone: bool = False,
    ) -> list[str]:
        """One answer per example.

        Args:
            texts: what is routed, one per example. tasks: where they are known.
            limit: tokens of a generated answer.
            is_chat: the texts stand for conversations.
            alone: texts are read by themselves, as at an endpoint, unless that asks for their tasks; else in the
                prompts of the batch.

        Raises:
            BankError: the router needs what is not given, or an adapter is damaged.
        """
        rule = self.loaded.head_rule
        heads = heads_of(self.loaded, tasks) if rule == "label_count" else ()
        if alone and not self.loaded.asks_for_task:
            readings = [self.loaded.reading(text, is_chat) for text in texts]
            batch, mixture = self.loaded.read(batch, readings, self._routed, self.backbone.codec, self.snapshot)
        else:
            mixture = self._mixture(batch, texts, tasks)
        with self.model.activate(mixture, rule, heads):
            return predict(self.backbone, batch, limit)

    def _routed(self, batch: Batch) -> Mixture:
        return self._mixture(batch, batch.texts, None)

    def _mixture(self, batch: Batch, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        if self.loaded.reads_prompts:
            return self.model.route_embeddings(self.loaded, batch.source_ids, batch.source_mask, tasks)
        return self.loaded.mixture(texts, tasks)


def heads_of(loaded: LoadedSnapshot, tasks: Sequence[str] | None) -> list[str]:
    """Rule `label_count`: whose head answers each example.

    Raises:
        BankError: no tasks are given, or one is unknown.
    """
    unknown = sorted(set(tasks or ()) - loaded.heads.keys())
    if tasks is None or unknown:
        raise BankError(
            f"the snapshot's label heads go by the task of each text (head_rule=label_count): got "
            f"{', '.join(unknown) or 'none'}, expected some of {', '.join(loaded.heads)}"
        )
    return [loaded.heads[task] for task in tasks]


def backbone_of(snapshot: Snapshot, given: str | None = None, permissions: Permissions = NONE_GIVEN) -> BackboneConfig:
    """How to load the snapshot's backbone: as its run did, or from `given`.

    Args:
        permissions: what the snapshot's author may run here; those of a snapshot without a run are used as they are.

    Raises:
        BankError: it needs more than that, or the model found there is another one.
    """
    unrecorded = {"name": snapshot.backbone.name, **asdict(permissions)}
    settings: dict[str, Any] = dict(snapshot.provenance.get("config", {}).get("backbone", unrecorded))
    _require(permissions, settings, f"snapshot {snapshot.number} was made with backbone")
    config = BackboneConfig(**{**settings, **({"name": given} if given else {})})
    found = identity(config)
    if found != snapshot.backbone.sha256:
        raise BankError(
            f"snapshot {snapshot.number} was made with backbone '{snapshot.backbone.name}' "
            f"({snapshot.backbone.sha256[:12]}), '{config.name}' is another model ({found[:12]}): name the right one"
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
    """The snapshot's router, its tensors read by `reader`.

    Args:
        permissions: what the snapshot's author may run here.
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
    """Fetches a snapshot's adapters from the bank itself."""
    entries = {entry.name: entry for entry in snapshot.adapters}
    return lambda name: bank.fetch(entries[name], snapshot.layouts[entries[name].layout])
