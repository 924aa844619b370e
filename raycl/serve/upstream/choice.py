"""Top-1 choice: the exported adapter that the snapshot's router gives the largest weight."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from raycl.bank import Bank, Snapshot
from raycl.errors import ConfigError, RayclError
from raycl.routing.routers import router_class
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import adapters_of, router_of
from raycl.serve.upstream.export import ExportRecord, read_record


class AdapterChoice:
    """Chooses among the adapters of an export.

    Attributes:
        loaded: the snapshot with its router; None: one adapter answers every text.
    """

    def __init__(self, record: ExportRecord, loaded: LoadedSnapshot | None) -> None:
        self.record, self.loaded = record, loaded

    def adapters(self, texts: Sequence[str], task: str | None = None, is_chat: bool = False) -> list[str]:
        """Return the adapter of each text; `base` where the router activates none.

        Args:
            task: task of all texts, where it is known. is_chat: the texts stand for conversations.

        Raises:
            BankError: the router needs the task, or does not know it.
        """
        if self.record.fixed is not None or self.loaded is None:
            return [self.record.fixed or "base"] * len(texts)
        read = [self.loaded.seen(self.loaded.reading(text, is_chat, task)) for text in texts]
        mixture = self.loaded.mixture(read, [task] * len(texts) if task else None)
        if not mixture.names:
            return ["base"] * len(texts)
        largest, columns = mixture.weights.max(1)
        names = [self.loaded.names[mixture.names[column]] for column in columns.tolist()]
        return [name if weight > 0 else "base" for name, weight in zip(names, largest.tolist(), strict=True)]


def open_choice(config: ServeConfig) -> AdapterChoice:
    """Return what chooses, with its sentence encoder loaded.

    Raises:
        ConfigError: the export is not there, is of another bank, or its router needs the backbone.
        BankError: the snapshot is missing or damaged. RetrievalError: another sentence encoder.
    """
    record = read_record(config.upstream.export or "")
    bank = Bank.at(config.bank)
    snapshot = bank.open(record.snapshot)
    if snapshot.sha256 != record.sha256:
        raise ConfigError(
            f"upstream.export is of snapshot {record.snapshot} with hash {record.sha256[:12]}, and that of the bank "
            f"'{config.bank}' has {snapshot.sha256[:12]}: name the bank that was exported"
        )
    if record.fixed is not None:
        return AdapterChoice(record, None)
    torch.set_num_threads(config.threads)
    _check_router(snapshot)
    router = router_of(bank, snapshot, config.permissions)
    choice = AdapterChoice(record, LoadedSnapshot.of(snapshot, router, adapters_of(bank, snapshot)))
    with suppress(RayclError):  # a router that needs the task has nothing to load
        choice.adapters(["a warm-up text"])
    return choice


def _check_router(snapshot: Snapshot) -> None:
    needed = {"embeddings", "hidden_states"} & router_class(snapshot.router).needs
    if needed:
        raise ConfigError(
            f"router '{snapshot.router.kind}' of snapshot {snapshot.number} reads the backbone's "
            f"{sorted(needed)[0].replace('_', ' ')}, and no backbone is loaded in front of another engine: export a "
            "fixed mixture (--adapters), or serve without upstream.url"
        )
