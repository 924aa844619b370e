"""Rows of files that are answered, in order, with those that cannot be used and the other columns of each."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from raycl.config import Tree
from raycl.data.benchmarks.layout import SUFFIXES
from raycl.data.sources.cache import cache_folder
from raycl.data.sources.fields import Columns, SourceRow, other_fields
from raycl.data.sources.formats import AUTO, Source, read_rows
from raycl.data.sources.hub import HUB, SAVED, HubSplit, is_dataset_folder, split_revision
from raycl.data.sources.reading import BadRow, Findings, ReadLimits
from raycl.data.sources.source import SourceFile
from raycl.storage import Storage

log: logging.Logger = logging.getLogger("raycl")

EMPTY = "the text is empty: expected at least one word, complete or remove the row"

FIRST_ROWS = 100
"""Rows of a file of which one must be usable: else what is wrong is wrong with the file or the command."""


class InputRow(NamedTuple):
    """A row with its file.

    Attributes:
        problem: why it cannot be answered; "": it can.
    """

    file: Source
    row: SourceRow
    problem: str = ""


@dataclass(frozen=True)
class Input:
    """Rows of files, in order.

    Attributes:
        columns: columns of text (and label). format: format of all files.
    """

    files: tuple[Source, ...]
    columns: Columns
    format: str = AUTO

    def rows(self) -> Iterator[tuple[Source, SourceRow]]:
        """Yield each row with its file.

        Raises:
            DataError: a file or row cannot be used.
        """
        for file in self.files:
            findings = Findings()
            for row in read_rows(file, self.format, self.columns, findings):
                yield file, row
            _log_notes(findings)

    def all_rows(self) -> Iterator[InputRow]:
        """Yield `rows` including those that cannot be used, with the other fields of each.

        Raises:
            DataError: a file cannot be used, or none of its first `FIRST_ROWS` rows can.
        """
        for file in self.files:
            bad: list[InputRow] = []
            is_usable = False
            for row in self._all_rows(file):
                is_usable |= not row.problem
                bad.append(row)
                if is_usable:
                    yield from bad
                    bad.clear()
                elif len(bad) == FIRST_ROWS:
                    break
            if bad:
                file.refuse(bad[0].problem, bad[0].row.number)

    def _all_rows(self, file: Source) -> Iterator[InputRow]:
        findings = _KeptFindings(file, self.columns)
        for row in read_rows(file, self.format, replace(self.columns, others=True), findings):
            yield from findings.taken()
            yield InputRow(file, row, "" if row.text.strip() else EMPTY)
        yield from findings.taken()
        _log_notes(findings)

    def tree(self) -> Tree:
        """Return what identifies it: names and hashes of the files, and how they are read."""
        hashes = {file.uri: file.content_hash(cache_folder(None)) for file in self.files}
        return {"files": hashes, "format": self.format, "columns": [list(self.columns.text), list(self.columns.label)]}


def files_at(
    addresses: Sequence[str],
    split: str = "test",
    config: str | None = None,
    limits: ReadLimits | None = None,
    format: str = AUTO,
) -> tuple[Source, ...]:
    """Return files at paths or URIs; of a folder, those with a known suffix, in the order of their names; datasets.

    Args:
        split, config: parts of a dataset: an `hf://` name, or a local folder in the hub's layout.
        limits: beyond which they are refused; None: the usual ones.
        format: format of the files, whose suffix may also be its name.

    Raises:
        DataError: a file does not exist, or a folder has none.
    """
    sources: list[Source] = []
    suffixes = (*SUFFIXES, f".{format}")
    for address in addresses:
        if address.startswith(HUB) and not address.endswith(suffixes):
            name, revision = split_revision(address)
            sources.append(HubSplit(name, split, config, revision))
            continue
        file, folder = SourceFile.at(address), Storage.at(address)
        if file.name.lower().endswith(suffixes):
            file.require()
            sources.append(file)
            continue
        names = sorted(name for name in folder.list() if name.lower().endswith(suffixes))
        local = Path(folder.root) if folder.is_local else None
        is_saved = local is not None and any((local / name).is_file() for name in SAVED)
        if local is not None and is_dataset_folder(local) and (config or is_saved or not names):
            name = "" if (local / SAVED[1]).is_file() else split
            sources.append(HubSplit(str(local), name, config, cache=str(cache_folder(None) / "hub")))
            continue
        if not names:
            file.refuse(f"expected a file, or a folder with files, that end with {', '.join(SUFFIXES)}, or a dataset")
        sources += [SourceFile(folder, name) for name in names]
    return tuple(sources) if limits is None else tuple(file.within(limits) for file in sources)


class _KeptFindings(Findings):
    """Bad rows are kept until they are taken."""

    def __init__(self, file: Source, columns: Columns) -> None:
        super().__init__()
        self._file, self._columns = file, columns
        self._bad: list[InputRow] = []

    def bad_row(self, problem: BadRow) -> None:
        """Keep it."""
        row = SourceRow(problem.row, "", ("",), others=other_fields(problem.item, self._columns))
        self._bad.append(InputRow(self._file, row, problem.problem))

    def taken(self) -> list[InputRow]:
        """Return the bad rows since the last call."""
        bad_rows, self._bad = self._bad, []
        return bad_rows


def _log_notes(findings: Findings) -> None:
    for note in findings.notes:
        log.info("%s", note)
