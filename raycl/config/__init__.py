"""Strict configuration: sections, overrides, unused settings, and what may run code of others."""

from __future__ import annotations

from raycl.config.assignment import Tree, apply_override, assign, read_override
from raycl.config.sections import (
    MARK,
    ConfigT,
    Location,
    PathOrUri,
    Section,
    Size,
    as_tree,
    from_yaml,
    load,
    load_tree,
    named,
    named_each,
    read_tree,
    read_yaml,
    require_file,
    to_yaml,
    tree_to_yaml,
    validate,
)
from raycl.config.trees import differences, fingerprint, flatten, remaining

__all__ = [
    "MARK",
    "ConfigT",
    "Location",
    "PathOrUri",
    "Section",
    "Size",
    "Tree",
    "apply_override",
    "as_tree",
    "assign",
    "differences",
    "fingerprint",
    "flatten",
    "from_yaml",
    "load",
    "load_tree",
    "named",
    "named_each",
    "read_override",
    "read_tree",
    "read_yaml",
    "remaining",
    "require_file",
    "to_yaml",
    "tree_to_yaml",
    "validate",
]
