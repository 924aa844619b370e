"""Writing into a config tree: overrides, and a tree laid over another one.

`method=lora` and `method: {name: lora}` are the same node, so neither an override nor a file that extends another may
treat a named node as a plain mapping.
"""

import json
import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from raycl.config.trainer_names import renamed
from raycl.errors import ConfigError

Tree = dict[str, Any]

CHOICES = frozenset({"method", "learner", "engine", "search", "scheduler"})
"""Keys of nodes whose `name` decides which other keys there are; a stream or a backbone only has a name."""


def apply_override(tree: Tree, override: str) -> None:
    """Set one `key.path=value` in `tree`, in place; interpolations in the value stay as they are.

    Raises:
        ConfigError: no `=`, an empty key, or a value that is not YAML.
    """
    source = f"override '{override}'"
    key, value = renamed(*read_override(override), source)
    assign(tree, key, value, source)


def inline_yaml(value: Any) -> str:
    """Return a value as an override has it behind `key=`."""
    return json.dumps(value, ensure_ascii=False)  # YAML reads JSON's two escapes of an emoji as two characters


def read_override(override: str) -> tuple[str, Any]:
    """Return the dotted key and value of `key.path=value`.

    Raises:
        ConfigError: see `apply_override`.
    """
    key, sign, text = override.partition("=")
    if not sign or not all(key.strip().split(".")):
        raise ConfigError(f"override '{override}' is not of the form key.path=value, for example method.r=8")
    try:
        value = deepcopy(_value_of(text))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"override '{override}': the value is not valid YAML: {one_line(error)}") from error
    if isinstance(value, dict) and not re.search(r"[\s{]", text):  # an IPv6 address such as `::` is no mapping
        return key.strip(), text
    return key.strip(), value


@lru_cache(maxsize=1024)
def _value_of(text: str) -> Any:
    """Return the value that a text means; kept, for every trial of a sweep and row of a comparison asks."""
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[call-overload, index]


def assign(tree: Tree, key: str, value: Any, source: str) -> None:
    """Set the value at a dotted key in `tree`, in place, as an override does; `source` names it in errors.

    Raises:
        ConfigError: a value stands where keys are expected.
    """
    parts, node = key.split("."), tree
    for position, part in enumerate(parts[:-1]):
        child = as_mapping(node.get(part))
        if child is None:
            path = ".".join(parts[: position + 1])
            raise ConfigError(f"{source}: '{path}' is {node[part]!r} and has no keys below it")
        node[part] = child
        node = child
    _assign(node, parts[-1], value)


def overlay(tree: Tree, changes: Tree) -> None:
    """Lay `changes` over `tree`, in place: mappings key by key, all else replaces what is there.

    Another choice (`CHOICES`) replaces the whole node, since the keys below belong to the former one.
    """
    for key, value in changes.items():
        merges = isinstance(value, dict) and not (key in CHOICES and _renames(tree.get(key), value))
        node = as_mapping(tree.get(key)) if merges else None
        if node is None:
            _assign(tree, key, value)
        else:
            overlay(node, value)
            tree[key] = node


def _renames(old: Any, new: Tree) -> bool:
    return "name" in new and name_of(old) not in (None, new["name"])


def as_mapping(node: Any) -> Tree | None:
    """Return a node that can hold keys: a name or a list of names becomes a mapping; None for other scalars."""
    if node is None:
        return {}
    if isinstance(node, str):
        return {"name": node} if "${" not in node else None
    if isinstance(node, list):
        names = [name_of(item) for item in node]
        return (
            {name: without_name(item) for name, item in zip(names, node, strict=True) if name} if all(names) else None
        )
    return node if isinstance(node, dict) else None


def name_of(item: Any) -> str | None:
    """Return the name of an item in a list of names or of mappings with a name; None for anything else."""
    name = item.get("name") if isinstance(item, dict) else item
    return name if isinstance(name, str) else None


def without_name(item: Any) -> Tree:
    return {key: value for key, value in item.items() if key != "name"} if isinstance(item, dict) else {}


def _assign(node: Tree, key: str, value: Any) -> None:
    """Set a value; the keys below stay where it has the same name as the old value, or the old value has none."""
    old = node.get(key)
    if isinstance(old, dict) and isinstance(value, str) and old.get("name", value) == value:
        value = {"name": value, **old}
    elif isinstance(old, dict) and isinstance(value, list) and any(_is_key(item, old) for item in value):
        value = {item: old.get(item, {}) for item in value}
    node[key] = value


def _is_key(item: Any, node: Tree) -> bool:
    return isinstance(item, str) and item in node


def one_line(error: BaseException) -> str:
    """Return the message of a library on one line; OmegaConf's `full_key: x object_type=dict` becomes `at 'x'`."""
    return re.sub(r" full_key: (\S+) object_type=\S+$", r", at '\1'", " ".join(str(error).split()))
