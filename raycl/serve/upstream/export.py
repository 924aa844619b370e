"""The record of an export for another engine, and top-1 choice among its adapters by the snapshot's router."""

from collections.abc import Sequence
from contextlib import suppress

import torch
from pydantic import BaseModel, ValidationError

from raycl.bank import Bank, Snapshot
from raycl.errors import ConfigError, RayclError, StorageError
from raycl.routing.routers import READS_STATES, router_class
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, rule_of
from raycl.serve.errors import UnknownTextError
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import adapters_of, router_of
from raycl.storage import Storage
from raycl.types import Mixture

RECORD = "export.json"
"""The record next to the adapters, written last, so that an export that has one is complete."""


class ExportRecord(BaseModel):
    """The record of an export.

    Attributes:
        snapshot, sha256: number and hash of the snapshot. base: name of the bare backbone in requests.
        models: exported adapter -> what requests call it. mixtures: exported adapter -> the bank's adapters -> weight.
    """

    snapshot: int
    sha256: str
    base: str
    models: dict[str, str]
    mixtures: dict[str, dict[str, float]]

    @property
    def fixed(self) -> str | None:
        """The only adapter of the export, which answers every text; None: the text determines the adapter."""
        return next(iter(self.models)) if len(self.models) == 1 else None

    def model_of(self, name: str) -> str:
        """Return what the engine calls `name`: an exported adapter or `base`; other names as they are."""
        return self.base if name == "base" else self.models.get(name, name)

    def write(self, storage: Storage) -> None:
        """Write it into the export's folder."""
        storage.write_json(RECORD, self.model_dump())


def read_record(folder: str) -> ExportRecord:
    """Return the record of an export.

    Raises:
        ConfigError: the folder holds none.
    """
    try:
        return ExportRecord.model_validate(Storage.at(folder).read_json(RECORD))
    except (StorageError, ValidationError) as error:
        raise ConfigError(
            f"upstream.export is '{folder}', where no {RECORD} can be read: give the folder that "
            "`raycl bank export --engine vllm` wrote, or its copy in the object store"
        ) from error


class AdapterChoice:
    """Chooses among the adapters of an export.

    Attributes:
        loaded: the snapshot with its router; None: one adapter answers every text.
    """

    def __init__(self, record: ExportRecord, loaded: LoadedSnapshot | None) -> None:
        self.record = record
        self.loaded = loaded

    def adapters(self, texts: Sequence[str], task: str | None = None, is_chat: bool = False) -> list[str]:
        """Return the adapter of each text; `base` where the router activates none.

        Args:
            task: task of all texts, where it is known. is_chat: the texts stand for conversations.

        Raises:
            BankError: the router needs the task, or does not know it. UnknownTextError: a text is refused.
        """
        if self.record.fixed is not None or self.loaded is None:
            return [self.record.fixed or "base"] * len(texts)
        loaded, readings = self.loaded, [self.loaded.reading(text, is_chat, task) for text in texts]

        def mixture_of(names: Sequence[str]) -> Mixture:
            seen = [loaded.seen(reading, name) for reading, name in zip(readings, names, strict=True)]
            return loaded.mixture(seen, [task] * len(texts) if task else None)

        mixture, _ = loaded.route(readings, mixture_of)
        if loaded.rule.refuses(mixture):
            raise UnknownTextError
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
    rule = rule_of(snapshot, router, config.unknown, config.false_alarms)
    choice = AdapterChoice(record, LoadedSnapshot.of(snapshot, router, adapters_of(bank, snapshot), rule=rule))
    with suppress(RayclError):  # a router that needs the task has nothing to load
        choice.adapters(["a warm-up text"])
    return choice


def _check_router(snapshot: Snapshot) -> None:
    needed = READS_STATES & router_class(snapshot.router).needs
    if needed:
        raise ConfigError(
            f"router '{snapshot.router.kind}' of snapshot {snapshot.number} reads the backbone's "
            f"{sorted(needed)[0].replace('_', ' ')}, and no backbone is loaded in front of another engine: export a "
            "fixed mixture (--adapters), or serve without upstream.url"
        )
