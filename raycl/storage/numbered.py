"""Numbered records of which the newest counts, and a note of its number.

    000001.json ...     created exclusively, never changed
    newest.json         the number of the newest one, written after it

Where the newest record is lost, the one before it would count again; the note says that there was one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from raycl.errors import DamagedError, FormatError
from raycl.storage.folder import Storage
from raycl.storage.records import Stamp, named_stamps, numbered, numbers, read_fields, seal, stamps

NOTE = "newest.json"
FORMAT = 1
LISTINGS = 3
"""Before a record counts as missing: a listing of a shared folder may miss what is just written."""


@dataclass(frozen=True)
class _Note:
    """Its record; the folder tells a note that was moved from its own."""

    folder: str
    newest: int


_NOTE = TypeAdapter(_Note)


class NumberedRecords:
    """The records of one folder, and its note."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage, self.folder = storage, folder
        self._noted: tuple[Stamp, int] | None = None

    def numbers(self) -> list[int]:
        """Of all records that are there, ascending."""
        return numbers(self.storage, self.folder)

    def there(self) -> dict[int, Stamp]:
        """Return the number of each record that is there -> its stamp."""
        return self._listed()[0]

    def stamps(self) -> dict[int, Stamp]:
        """Return the same where the newest one is there. The note is read again only when its file has changed.

        Raises:
            DamagedError: the newest record is missing.
        """
        for _ in range(LISTINGS):
            found, note = self._listed()
            if (noted := self._read(note)) <= max(found, default=0):
                return found
        raise self._missing(noted)

    def next_number(self) -> int:
        """Return the number of the next record, which no record had, lost ones included."""
        found, note = self._listed()
        return max([*found, self._read(note)], default=0) + 1

    def create(self, number: int, record: dict[str, Any]) -> None:
        """Create a record, then note the newest one.

        Raises:
            AlreadyExistsError: another writer was first.
        """
        self.storage.create(f"{self.folder}/{numbered(number)}", seal(record))
        note = _Note(self.folder, max(self.numbers(), default=number))  # of a writer that was faster, too
        self.storage.write(f"{self.folder}/{NOTE}", seal({"format": FORMAT, **vars(note)}))

    def problems(self) -> list[str]:
        """One sentence for each record that is missing, and for a note that cannot be read."""
        found, note = self._listed()
        noted, problems = 0, []
        try:
            noted = self._note() if note is not None else 0
        except (DamagedError, FormatError) as error:
            problems.append(f"{error}; the next record writes it again")
        last = max([*found, noted], default=0)
        return problems + [str(self._missing(number)) for number in range(1, last + 1) if number not in found]

    def _listed(self) -> tuple[dict[int, Stamp], Stamp | None]:
        """Return the records, and the note's stamp; None: there is no note."""
        found = named_stamps(self.storage, self.folder)
        return stamps(found), found.get(NOTE)

    def _read(self, stamp: Stamp | None) -> int:
        """Return the number that is noted; 0: none is, or it cannot be read (`problems` says so)."""
        if stamp is None:
            return 0
        if self._noted is None or self._noted[0] != stamp:
            try:
                self._noted = (stamp, self._note())
            except (DamagedError, FormatError):
                self._noted = (stamp, 0)
        return self._noted[1]

    def _note(self) -> int:
        found = read_fields(self.storage, f"{self.folder}/{NOTE}", FORMAT, _NOTE)
        if found.folder != self.folder:
            raise DamagedError(f"'{self.storage.uri}/{self.folder}/{NOTE}' is of '{found.folder}': it was moved")
        return found.newest

    def _missing(self, number: int) -> DamagedError:
        return DamagedError(f"'{self.storage.uri}/{self.folder}/{numbered(number)}' is missing: restore a copy")
