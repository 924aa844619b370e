"""Datasets of the hub: by name, as a local folder in the hub's layout, or saved with `save_to_disk`.

The library `datasets` knows the layouts (shards, configurations, class names, split slices); here its splits become
sources of rows like files.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus, urlsplit

import yaml

from raycl.data.sources.fields import Columns, SourceRow, usable_rows, without_nulls
from raycl.data.sources.parquet import BATCH, check_parquet
from raycl.data.sources.reading import USUAL_LIMITS, Findings, NamedSource, ReadLimits, check_compressed
from raycl.data.sources.slices import Slice, named_in, sliced
from raycl.data.sources.source import SourceFile
from raycl.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hf://"
SQL = "sql:"
"""The prefix of the connection URI of a database, whose tables or queries are splits."""
ARROW = ".arrow"
CARDS = ("README.md", ".huggingface.yaml")
"""Files of a dataset that may say which files hold its splits."""
NO_LABEL = "-1"
"""The hub's datasets have this value where a label is not known, as in public test sets."""
SAVED = ("dataset_dict.json", "state.json")
"""Files of a folder that `save_to_disk` wrote, with several splits and with one."""
MOST_DESCRIBED = 1_000_000
"""Entries of a card or another file that describes a dataset."""
_BATCH = 1024
_PASSWORD = re.compile(r"(?:^|[&;])\w*(?:password|passwd|pwd)=", re.IGNORECASE)
"""A key of a database's URI that holds a password: password, sslpassword, pwd, PWD inside `odbc_connect`."""


@dataclass(frozen=True)
class HubSplit(NamedSource):
    """A split of a dataset.

    Attributes:
        path: `hf://NAME`, an absolute local folder or Arrow file, or `sql:URI` of a database.
        split: its name, or a slice as `datasets` writes it (`train[:90%]`); "" for a folder or an Arrow file that is
            one split. Of a database, a table or a query.
        config: name of the dataset's configuration; None: its only or default one.
        revision: commit, branch or tag on the hub.
        cache: folder for converted files; None: that of `datasets`.
        limits: files and rows beyond these are refused.
    """

    path: str
    split: str
    config: str | None = None
    revision: str | None = None
    cache: str | None = None
    limits: ReadLimits = USUAL_LIMITS

    @property
    def name(self) -> str:
        return self.split

    @property
    def uri(self) -> str:
        return " ".join(filter(None, (self.path, self.config, self.split and f"split '{self.split}'")))

    def within(self, limits: ReadLimits) -> HubSplit:
        """Return the same split with these limits."""
        return replace(self, limits=limits)

    def require(self) -> None:
        """Make sure that the split can be read; files that are not on this machine are downloaded.

        Raises:
            DataError: the split cannot be read.
        """
        assert self.dataset is not None, "opening it raises errors"

    @cached_property
    def dataset(self) -> Dataset:
        """The rows, memory-mapped.

        Raises:
            DataError: no such dataset, configuration or split, or it is damaged or out of reach.
        """
        return _open(self)

    def content_hash(self, cache: Path) -> str:
        """Return the SHA-256 in hex of its files on this machine and its columns; remembered as those of files are."""
        parts = [SourceFile.at(file["filename"]).content_hash(cache) for file in self.dataset.cache_files]
        if not parts:  # rows in memory
            digest = hashlib.sha256()
            for batch in self.dataset.with_format("arrow").iter(batch_size=_BATCH):
                digest.update(repr(batch.to_pylist()).encode())
            parts = [digest.hexdigest()]
        described = json.dumps([self.split, str(self.dataset.features), len(self.dataset), *parts])
        return hashlib.sha256(described.encode()).hexdigest()

    def labels(self, columns: Columns) -> tuple[str, ...] | None:
        """Class names of the label column, in order; None where it has none."""
        there = [name for name in columns.label if name in self.dataset.features]
        names = class_names(self.dataset.features[there[0]]) if there else None
        return None if names is None else tuple(names)

    def rows(self, columns: Columns, findings: Findings) -> Iterator[SourceRow]:
        """Yield the rows in order, with class names for class numbers.

        Raises:
            DataError: a row cannot be used.
        """
        needed = columns.needed(self.dataset.column_names, self.refuse)
        items = (without_nulls(item, columns) for item in self._items(needed))
        return usable_rows(enumerate(items, start=1), columns, self.refuse, findings)

    def _items(self, names: list[str]) -> Iterator[dict[str, Any]]:
        for name in names:
            if _opens_files(self.dataset.features[name]):
                self.refuse(f"column '{name}' holds pictures or sound: expected text or classes")
        classes = {name: class_names(self.dataset.features[name]) for name in names}
        for batch in self.dataset.select_columns(names).iter(batch_size=_BATCH):
            for values in zip(*(batch[name] for name in names), strict=True):
                yield {name: named(value, classes[name]) for name, value in zip(names, values, strict=True)}


def split_revision(address: str) -> tuple[str, str | None]:
    """Return an address without `@REVISION`, and the revision, if it is that of a dataset on the hub."""
    name, _, revision = address.partition("@") if address.startswith(HUB) else (address, "", "")
    return name, revision or None


def is_dataset_folder(folder: Path) -> bool:
    """Return whether `datasets` would find data in a local folder: data files, a card, or a saved dataset."""
    if not folder.is_dir():
        return False
    marks = (*SAVED, "dataset_infos.json", "README.md", "data")
    words = ("train", "test", "valid", "dev")
    has_splits = any(path.name.lower().startswith(words) for path in folder.iterdir())
    return has_splits or any((folder / name).exists() for name in marks) or any(folder.glob("*.parquet"))


def _opens_files(feature: Any) -> bool:
    """Return whether reading a column opens files that its rows name; one of JSON, as calls of tools are, does not."""
    from datasets.features.features import require_decoding

    if isinstance(feature, dict):
        return any(map(_opens_files, feature.values()))
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _opens_files(inner)
    return type(feature).__name__ != "Json" and require_decoding(feature)


def class_names(feature: Any) -> list[str] | None:
    """Return names of a column of classes, or of lists of these."""
    inner = getattr(feature, "feature", feature)
    return list(inner.names) if type(inner).__name__ == "ClassLabel" else None


def named(value: Any, names: list[str] | None) -> Any:
    """Return class names for the class numbers of a field; other values as they are."""
    if names is None or value is None:
        return value
    if isinstance(value, list):
        return [names[number] if number >= 0 else NO_LABEL for number in value]
    return names[value] if value >= 0 else NO_LABEL


def _open(split: HubSplit) -> Dataset:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with _explained(split):
        folder = Path(split.path)
        if split.path.startswith(SQL):
            return _of_database(split)
        if split.path.endswith(ARROW):
            return _of_arrow(split)
        if any((folder / name).is_file() for name in SAVED):
            _require_inside(split, [*folder.glob("*.json"), *folder.glob("*/state.json")])
            return _saved(split, datasets.load_from_disk(split.path))
        name = split.path.removeprefix(HUB).removeprefix("datasets/")
        _require_inside(split, [folder / card for card in CARDS] if folder.is_dir() else _cards(name, split.revision))
        names = datasets.get_dataset_config_names(name, revision=split.revision)
        if split.config is None and len(names) > 1 and "default" not in names:
            split.refuse(f"the dataset has {len(names)} configurations: set config to one of {', '.join(names)}")
        config = split.config or (None if "default" in names else names[0])
        batch_rows = _checked(split, name, config) if folder.is_dir() else None
        more: dict[str, Any] = {} if batch_rows is None else {"batch_size": batch_rows}
        more |= {"revision": split.revision, "cache_dir": split.cache}
        try:
            return datasets.load_dataset(name, config, split=split.split, **more)
        except ValueError as error:
            wanted, part = sliced(split.split)
            there = re.findall(r"'([^']+)'", str(error).partition("one of ")[2]) if "nknown split" in str(error) else []
            known = named_in(wanted, there)
            if known is None:
                raise
            return datasets.load_dataset(name, config, split=f"{known}{part or ''}", **more)


def _checked(split: HubSplit, name: str, config: str | None) -> int | None:
    """Return how many rows `datasets` may read at once of a folder's Parquet files; None: as many as usual."""
    import datasets

    data_files = datasets.load_dataset_builder(name, config, cache_dir=split.cache).config.data_files or {}
    paths = {Path(path) for files in data_files.values() for path in files if Path(path).is_file()}
    for path in paths:
        check_compressed(path, split.limits, split.refuse)
    rows = [check_parquet(SourceFile.at(path).within(split.limits)) for path in paths if path.suffix == ".parquet"]
    return min(rows) if rows and min(rows) < BATCH else None


def _cards(name: str, revision: str | None) -> list[Path]:
    from huggingface_hub import hf_hub_download

    cards = []
    for card in CARDS:
        with suppress(OSError, ValueError):  # there is none, or the hub does not answer, which loading reports
            cards.append(Path(hf_hub_download(name, card, repo_type="dataset", revision=revision)))
    return cards


def _require_inside(split: HubSplit, files: Sequence[Path]) -> None:
    """Refuse a dataset whose description names data elsewhere: any server would be asked, and any file read."""
    for file in files:
        outside = next(_outside(_described(file)), None) if file.is_file() else None
        if outside is not None:
            split.refuse(f"{file.name} names {outside!r:.200}: expected files of the dataset itself, copy them there")


def _described(file: Path) -> Any:
    from huggingface_hub import DatasetCard

    if file.suffix == ".md":
        return DatasetCard.load(file, ignore_metadata_errors=True).data.to_dict().get("configs")
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(tree, dict):
        return None
    return [tree.get(key) for key in ("configs", "_data_files", "splits")]


def _outside(tree: Any) -> Iterator[str]:
    """Yield the texts in a tree that are addresses, absolute paths, or paths that lead up."""
    nodes = [tree]
    for node in nodes:
        if isinstance(node, dict | list):
            nodes += node.values() if isinstance(node, dict) else node
        elif isinstance(node, str) and ("://" in node or Path(node).is_absolute() or ".." in Path(node).parts):
            yield node
        if len(nodes) > MOST_DESCRIBED:
            raise ValueError(f"its description has more than {MOST_DESCRIBED:,} entries")


def _saved(split: HubSplit, loaded: Any) -> Dataset:
    if not hasattr(loaded, "keys"):
        if split.split:
            split.refuse("the folder is one split: expected a folder of several (DatasetDict), or name it as a file")
        return loaded
    name, part = sliced(split.split)
    known = named_in(name, list(loaded))
    if known is None:
        raise ValueError(f'Unknown split "{name}". Should be one of {list(loaded)}.')
    return _slice(loaded[known], part)


def _slice(dataset: Dataset, part: Slice | None) -> Dataset:
    if part is None:
        return dataset
    positions = part.of(lambda: len(dataset))
    there = range(len(dataset))[positions.start : positions.stop]
    chosen: Dataset = dataset.select(there or [])  # datasets takes no range that is empty
    return chosen


def _of_arrow(split: HubSplit) -> Dataset:
    """Return the rows of an Arrow file, in the format of streams or of files."""
    import datasets
    import pyarrow as pa

    if not Path(split.path).is_file():
        split.refuse("the file does not exist: expected a data file there, check the path")
    try:
        return datasets.Dataset.from_file(split.path)
    except pa.ArrowInvalid:
        loaded: Dataset = datasets.load_dataset("arrow", data_files=split.path, split="train", cache_dir=split.cache)
        return loaded


def _of_database(split: HubSplit) -> Dataset:
    """Return the rows of a table or a query, in memory, for the database may change."""
    import datasets
    from datasets.exceptions import DatasetsError

    uri = split.path.removeprefix(SQL)
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        raise DataError(
            f"{split.uri}: reading a database needs SQLAlchemy and the database's driver: pip install sqlalchemy"
        ) from error
    parts = urlsplit(uri)
    if parts.password or _PASSWORD.search(unquote_plus(parts.query)):
        raise DataError(
            "the URI of the database has a password, which a run would record: leave it out, and give it where the "
            "database's driver looks for it (a file or variable of its own)"
        )
    query, part = sliced(split.split)
    try:
        with TemporaryDirectory() as folder:
            dataset = datasets.Dataset.from_sql(query, uri, cache_dir=folder, keep_in_memory=True)
    except (SQLAlchemyError, ImportError, DatasetsError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, ImportError):
            raise DataError(f"{split.uri}: the database needs its driver ({cause}): install it with pip") from error
        raise DataError(
            f"{split.uri}: the database refuses ({' '.join(str(cause).split())[:300]}): expected a "
            "table or a query for each split, for example splits.train='SELECT text, label FROM tickets ORDER BY id'"
        ) from error
    return _slice(dataset, part)


@contextmanager
def _explained(split: HubSplit) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, OSError, ValueError, RecursionError) as error:
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        text = " ".join(str(cause).split())[:300]
        if "nknown split" in text:
            there = text.partition("one of ")[2].strip("[]. ").replace("'", "")
            raise DataError(
                f"{split.uri}: there is no such split: expected one of {there}; name them in splits, for example "
                f"splits.train='train[:90%]' splits.test='train[90%:]'"
            ) from error
        raise DataError(
            f"cannot read {split.uri}: {text}; expected a dataset of the Hugging Face hub or a local folder in its "
            "layout, check name, config and revision"
        ) from error
