"""Path, type, default and description of every setting, from the config classes themselves.

The reference is generated, so it describes the settings of this version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from raycl.config.reference import described, tag_of
from raycl.config.sections import sections_in

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
