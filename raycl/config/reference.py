"""Path, type, default and description of every setting, from the config classes themselves.

The reference in the documentation and the comments of `--print-config` are generated, so they describe the settings of
this version.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from raycl.config.assignment import Tree
from raycl.config.sections import sections_in, to_yaml

COLUMN = 36
"""The column where comments begin, unless a setting is longer."""

LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        path: dotted path; `[]` stands for each item of a list, `<name>` for a free key.
        type: type with its choices or limits.
        default: default as YAML; empty where there is none, or for a section.
    """

    path: str
    type: str
    default: str
    description: str


@dataclass(frozen=True)
class SettingsGroup:
    """The settings of one section.

    Attributes:
        path: dotted path of the section; empty for the top level.
        choice: `method=lora` for a section that is one of several choices; else empty.
        description: its docstring.
    """

    path: str
    choice: str
    description: str
    settings: list[Setting] = field(default_factory=list)


def groups(model: type[BaseModel]) -> list[SettingsGroup]:
    """Return all sections of a config class once, each before those inside it."""
    return list(_groups(model, "", "", set()))


def _groups(model: type[BaseModel], path: str, choice: str, seen: set[type[BaseModel]]) -> Iterator[SettingsGroup]:
    seen.add(model)
    schema = model.model_json_schema()
    prefix = f"{path}." if path else ""
    group = SettingsGroup(path, choice, " ".join((model.__doc__ or "").split()))
    inner = []
    for name, info in model.model_fields.items():
        text = _type(schema["properties"][name], schema.get("$defs", {}))
        group.settings.append(Setting(f"{prefix}{name}", text, _default(info), described(model, name)))
        inner += [(info, f"{prefix}{name}", kind) for kind in sections_in(info.annotation)]
    yield group
    for info, below, kind in inner:
        if kind not in seen:
            tag = tag_of(kind)
            below += _item(info.annotation, tag)
            yield from _groups(kind, below, f"{below}={tag}" if tag and not below.endswith(tag) else "", seen)


def _item(annotation: Any, tag: str) -> str:
    """Return the text between the path of a field and the keys of the sections in it."""
    origins = {get_origin(part) for part in (annotation, *get_args(annotation))}
    if dict in origins:
        return f".{tag or '<name>'}"
    return "[]" if tuple in origins else ""


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


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True)
    return tag_of(type(value)) if isinstance(value, BaseModel) else _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _type(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in node:
        properties = definitions[node["$ref"].rpartition("/")[2]]["properties"]
        return str(properties.get("name", {}).get("const", "section"))
    for key in ("anyOf", "oneOf", "enum", "prefixItems"):
        if key in node:
            types = [str(item) if key == "enum" else _type(item, definitions) for item in node[key]]
            if key == "prefixItems":
                return f"[{', '.join(types)}]"
            return " or ".join(", ".join(dict.fromkeys(types)).rsplit(", ", 1))
    if "const" in node:
        return str(node["const"])
    if "items" in node:
        return f"list of {_type(node['items'], definitions)}"
    if isinstance(node.get("additionalProperties"), dict):
        return f"mapping of names to {_type(node['additionalProperties'], definitions)}"
    limits = " and ".join(f"{sign} {_shown(node[key])}" for key, sign in LIMITS.items() if key in node)
    return " ".join([{"object": "mapping"}.get(str(node.get("type")), str(node.get("type", "any"))), limits]).strip()


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
            yield from _comments(below, _by_text(value).get(key.value))


def _by_text(value: Mapping[Any, Any]) -> Tree:
    return {str(key): item for key, item in value.items()}
