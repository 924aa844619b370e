"""The record of an export for another engine: of which snapshot it is, and what requests call its adapters."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from raycl.errors import ConfigError, StorageError
from raycl.storage import Storage

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
        """Into the export's folder."""
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
