"""Config trees as flat maps of dotted paths: what differs between two, what is left without some, a fingerprint."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from raycl.config.assignment import Tree
from raycl.config.sections import as_tree


def flatten(tree: Tree, prefix: str = "") -> Tree:
    """Return dotted path -> leaf value."""
    leaves: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves.update(flatten(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def remaining(tree: Tree, without: Iterable[str]) -> Tree:
    """Return the tree without these sections and settings, by dotted path."""
    left_out, rest = tuple(without), {}
    for key, value in tree.items():
        inner = [path.removeprefix(f"{key}.") for path in left_out if path.startswith(f"{key}.")]
        if key not in left_out:
            rest[key] = remaining(value, inner) if inner and isinstance(value, dict) else value
    return rest


def fingerprint(config: BaseModel, without: Iterable[str] = ()) -> str:
    """Return the first 16 hex digits of the SHA-256 of the canonical tree, sections and settings `without` left out."""
    tree = remaining(as_tree(config), without)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def differences(old: Tree, new: Tree, without: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> (old value, new value) for every leaf that differs outside of `without`."""
    left_out = tuple(without)
    before, after = flatten(remaining(old, left_out)), flatten(remaining(new, left_out))
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
