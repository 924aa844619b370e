"""Strict configuration: one YAML tree, dotted overrides, errors that name the dotted key, a fingerprint.

Why it exists: a typo must be an error with the nearest valid key, before any work starts.
OmegaConf parses, pydantic validates; ours is only the sugar for named nodes and the wording of errors.
What it does not know: which sections exist (`raycl.run.RunConfig` puts the tree together).

Named nodes: `method=lora method.rank=8` is short for `method: {name: lora, rank: 8}`, and
`modifiers=[migu] modifiers.migu.threshold=0.7` for `modifiers: {migu: {threshold: 0.7}}`. Naming another
choice drops the keys of the former one, since they belong to it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from raycl.errors import ConfigError

Tree = dict[str, Any]


class Section(BaseModel):
    """Base of every config section: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


SectionT = TypeVar("SectionT", bound=Section)


def load(model: type[SectionT], path: str | None, overrides: Sequence[str] = ()) -> SectionT:
    """Read YAML at `path` (None: all defaults), apply `key.path=value` overrides in order, validate.

    Raises:
        ConfigError: unreadable file, malformed override, unknown key, wrong value.
    """
    tree = read_yaml(path) if path is not None else {}
    for override in overrides:
        apply_override(tree, override)
    return validate(model, tree)


def read_yaml(path: str) -> Tree:
    """The YAML tree at `path`, interpolations resolved, duplicate keys refused.

    Raises:
        ConfigError: the file is missing, is not YAML, or is not a mapping.
    """
    if not Path(path).is_file():
        raise ConfigError(f"config file '{path}' does not exist: give the path of a YAML file")
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"config file '{path}' is not valid YAML: {_one_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config file '{path}' holds a {type(tree).__name__}: expected a mapping of sections")
    return {str(key): value for key, value in tree.items()}


def apply_override(tree: Tree, override: str) -> None:
    """Set one `key.path=value` in `tree`, in place.

    Raises:
        ConfigError: no `=`, an empty key, or a value that is not YAML.
    """
    key, sign, text = override.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts):
        raise ConfigError(f"override '{override}' is not of the form key.path=value, for example method.rank=8")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=True)["value"]  # type: ignore[call-overload, index]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override '{override}': the value is not valid YAML: {_one_line(error)}") from error
    node = tree
    for position, part in enumerate(parts[:-1]):
        child = _as_mapping(node.get(part))
        if child is None:
            path = ".".join(parts[: position + 1])
            raise ConfigError(f"override '{override}': '{path}' is {node[part]!r} and has no keys below it")
        node[part] = child
        node = child
    _assign(node, parts[-1], value)


def _as_mapping(node: Any) -> Tree | None:
    """A node that can hold keys: a name or a list of names becomes a mapping; None for other scalars."""
    if node is None:
        return {}
    if isinstance(node, str):
        return {"name": node}
    if isinstance(node, list) and all(isinstance(item, str) for item in node):
        return {item: {} for item in node}
    return node if isinstance(node, dict) else None


def _assign(node: Tree, key: str, value: Any) -> None:
    old = node.get(key)
    if isinstance(value, str) and isinstance(old, dict) and old.get("name") == value:
        return
    node[key] = value


def validate(model: type[SectionT], tree: Tree) -> SectionT:
    """Check `tree` against `model`.

    Raises:
        ConfigError: one sentence a problem, each with its dotted path and the nearest valid key.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problems = [_explain(model, detail) for detail in error.errors()]
        raise ConfigError("; ".join(dict.fromkeys(problems))) from error


def _explain(model: type[BaseModel], detail: ErrorDetails) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        owner, keys = _known_keys(model, detail["loc"][:-1], detail)
        near = difflib.get_close_matches(str(detail["loc"][-1]), keys, n=1, cutoff=0.5)
        hint = f": did you mean '{'.'.join([*owner, near[0]])}'?" if near else f": expected one of {', '.join(keys)}"
        return f"unknown config key '{path}'{hint}"
    if detail["type"] in ("value_error", "assertion_error"):
        text = str(detail.get("ctx", {}).get("error", detail["msg"]))
        return f"{path}: {text}" if path and not text.startswith(f"{path}") else text
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"config key '{path}' is {detail['input']!r}: {message}"


def _known_keys(model: type[BaseModel], loc: Sequence[Any], detail: ErrorDetails) -> tuple[list[str], list[str]]:
    """Dotted owner and the keys that are valid below `loc`."""
    current: type[BaseModel] = model
    for part in loc:
        info = current.model_fields.get(str(part))
        nested = [kind for kind in _classes(info.annotation) if issubclass(kind, BaseModel)] if info else []
        if not nested:
            break
        current = nested[0]
    return [str(part) for part in loc], sorted(current.model_fields)


def _classes(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from _classes(argument)


def as_tree(config: BaseModel) -> Tree:
    """The resolved config as plain JSON-able values."""
    return config.model_dump(mode="json")


def to_yaml(config: BaseModel) -> str:
    """The resolved tree as YAML, ready to be loaded again."""
    return yaml.safe_dump(as_tree(config), sort_keys=False, allow_unicode=True)


def flatten(tree: Tree, prefix: str = "") -> Tree:
    """Dotted path -> leaf value."""
    leaves: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves.update(flatten(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def fingerprint(config: BaseModel, without: Iterable[str] = ()) -> str:
    """First 16 hex digits of the SHA-256 of the canonical tree, top-level sections `without` left out."""
    left_out = set(without)
    tree = {key: value for key, value in as_tree(config).items() if key not in left_out}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def differences(old: Tree, new: Tree, without: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value) for every leaf that differs outside the sections `without`."""
    left_out = set(without)
    before = {key: value for key, value in flatten(old).items() if key.split(".")[0] not in left_out}
    after = {key: value for key, value in flatten(new).items() if key.split(".")[0] not in left_out}
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
