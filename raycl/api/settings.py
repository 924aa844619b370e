"""Settings as Python programs give them, with paths as objects."""

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any


def with_texts(value: Any) -> Any:
    """Return settings with the text of each path, as config files and records have it."""
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Mapping):
        return {key: with_texts(item) for key, item in value.items()}
    return list(map(with_texts, value)) if isinstance(value, list | tuple) else value
