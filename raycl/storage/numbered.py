"""Numbered records of which the newest counts, and a note of its number.

    000001.json ...     created exclusively, never changed
    newest.json         the number of the newest one, written after it

Where the newest record is lost, the one before it would count again; the note says that there was one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raycl.errors import DamagedError, FormatError
from raycl.storage.folder import Storage
from raycl.storage.records import Stamp, named_stamps, numbered, numbers, read_fields, seal, stamps

T = TypeVar("T")

NOTE = "newest.json"
FORMAT = 1
LISTINGS = 3
"""Listings before a record counts as missing: a shared folder's listing may lack a file that was just written."""


@dataclass(frozen=True)
class _Note:
    """The record of the note; its folder reveals a note that was moved."""

    folder: str
    newest: int


class NumberedRecords(Generic[T]):
    """The records of one folder, and its note."""

    def __init__(self, storage: Storage, folder: str, read: Callable[[int], T]) -> None:
        """Open the folder; `read` reads the record of a number."""
        self.storage, self.folder = storage, folder
        self._read_record = read
        self._known: dict[int, tuple[Stamp, T]] = {}
        self._noted: tuple[Stamp, int] | None = None

    def file(self, number: int) -> str:
        """Return the file of a record."""
        return f"{self.folder}/{numbered(number)}"

    def newest(self) -> T | None:
        """Return the newest record; None: there is none.

        Raises:
            DamagedError: it is missing; or what reading it raises.
        """
        stamps = self.stamps()
        return self.known(max(stamps), stamps[max(stamps)]) if stamps else None

    def known(self, number: int, stamp: Stamp) -> T:
        """Return a record, which is read again only when its stamp has changed: endpoints look twice a second."""
        if number not in self._known or self._known[number][0] != stamp:
            self._known[number] = (stamp, self._read_record(number))
        return self._known[number][1]

    def numbers(self) -> list[int]:
        """Return the numbers of all existing records, ascending."""
        return numbers(self.storage, self.folder)

    def there(self) -> dict[int, Stamp]:
        """Return number -> stamp of each existing record."""
        return self._listed()[0]

    def stamps(self) -> dict[int, Stamp]:
        """Return number -> stamp, after checking the newest record. The note is read again only when its file changed.

        Raises:
            DamagedError: the newest record is missing.
        """
        for _ in range(LISTINGS):
            listed, note = self._listed()
            if (noted := self._read(note)) <= max(listed, default=0):
                return listed
        raise self._missing(noted)

    def next_number(self) -> int:
        """Return the number of the next record, which no record had, lost ones included."""
        listed, note = self._listed()
        return max([*listed, self._read(note)], default=0) + 1

    def create(self, number: int, record: dict[str, Any]) -> None:
        """Create a record, then note the newest one.

        Raises:
            AlreadyExistsError: another writer was first.
        """
        self.storage.create(self.file(number), seal(record))
        note = _Note(self.folder, max([number, *self.numbers()]))  # a faster writer's record may be newer
        self.storage.write(f"{self.folder}/{NOTE}", seal({"format": FORMAT, **vars(note)}))

    def problems(self) -> list[str]:
        """Return a sentence for each record that is missing, and for a note that cannot be read."""
        listed, note = self._listed()
        noted, problems = 0, []
        try:
            noted = self._note() if note is not None else 0
        except (DamagedError, FormatError) as error:
            problems.append(f"{error}; the next record writes it again")
        last = max([*listed, noted], default=0)
        return problems + [str(self._missing(number)) for number in range(1, last + 1) if number not in listed]

    def _listed(self) -> tuple[dict[int, Stamp], Stamp | None]:
        """Return the records, and the note's stamp; None: there is no note."""
        named = named_stamps(self.storage, self.folder)
        return stamps(named), named.get(NOTE)

    def _read(self, stamp: Stamp | None) -> int:
        """Return the noted number; 0: there is none, or it cannot be read (`problems` reports that)."""
        if stamp is None:
            return 0
        if self._noted is None or self._noted[0] != stamp:
            try:
                self._noted = (stamp, self._note())
            except (DamagedError, FormatError):
                self._noted = (stamp, 0)
        return self._noted[1]

    def _note(self) -> int:
        record = read_fields(self.storage, f"{self.folder}/{NOTE}", FORMAT, _Note)
        if record.folder != self.folder:
            raise DamagedError(f"'{self.storage.uri}/{self.folder}/{NOTE}' is of '{record.folder}': it was moved")
        return record.newest

    def _missing(self, number: int) -> DamagedError:
        return DamagedError(f"'{self.storage.uri}/{self.file(number)}' is missing: restore a copy")
