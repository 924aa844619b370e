"""The descriptions of settings, from the config classes themselves, as comments of `--print-config`."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from raycl.config.sections import sections_in, to_yaml

COLUMN = 36
"""The column where comments begin, unless a setting is longer."""


def tag_of(model: type[BaseModel]) -> str:
    """Return the value of `name` that chooses this section among several; empty if nothing does."""
    info = model.model_fields.get("name")
    values = () if info is None else get_args(info.annotation)
    return str(values[0]) if len(values) == 1 and isinstance(values[0], str) else ""


def described(model: type[BaseModel], name: str) -> str:
    """Return the description of a field, else of the section in it, or of the one that a name chooses."""
    info = model.model_fields[name]
    inner = sections_in(info.annotation)
    if info.description:
        return info.description
    if len(inner) == 1 or (name == "name" and tag_of(model)):
        return _sentence((inner[0] if inner else model).__doc__ or "").rstrip(".")
    return ""


def _sentence(text: str) -> str:
    return re.split(r"\. (?=[A-Z])", " ".join(text.split()))[0]


def commented_yaml(config: BaseModel) -> str:
    """Return `to_yaml` with the description of each setting as a comment; it loads as the same config.

    A setting whose value takes several lines has its comment above it.
    """
    text = to_yaml(config)
    lines = text.splitlines()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert root is not None, "a config has settings"
    for line, beside, comment in sorted(_comments(root, config), reverse=True):
        if beside:
            lines[line] = f"{lines[line].ljust(COLUMN)}  # {comment}"
        else:
            lines.insert(line, f"{' ' * (len(lines[line]) - len(lines[line].lstrip()))}# {comment}")
    return "\n".join(lines) + "\n"


def _comments(node: yaml.Node, value: Any) -> Iterator[tuple[int, bool, str]]:
    """Yield line, whether the comment fits on it, and the comment of each setting below a node."""
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list | tuple):
        for item, inner in zip(node.value, value, strict=True):
            yield from _comments(item, inner)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, below in node.value:
        if isinstance(value, BaseModel):
            spread = isinstance(below, yaml.ScalarNode) and below.end_mark.line > key.start_mark.line
            yield key.start_mark.line, not spread, _sentence(described(type(value), key.value))
            yield from _comments(below, getattr(value, key.value))
        elif isinstance(value, dict):
            yield from _comments(below, {str(name): item for name, item in value.items()}.get(key.value))
