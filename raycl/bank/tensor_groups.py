"""Tensors of a state by name, in groups that are stored together as one object."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

PUBLISHED = "published"
"""Kind of the tensors of the router that a phase has published."""

ROUTERS = ("router", "attention", "selector", "texts", PUBLISHED)
"""Kinds of tensors that are named as in `raycl.types.RouterState`."""

WHOLE = "tensor"
"""Name of the tensor in a group that holds one."""

_ADAPTER_NUMBER = re.compile(r"\.\d+(-\d+)?$")


class TensorGroups(Mapping[str, Tensor]):
    """Tensors by name, grouped by what they belong to, so that those of earlier tasks are groups that do not change.

    Group `<kind>/<owner>/` holds `<kind>/<owner>/<part>`, an adapter for example. Group `<kind>//<owner>` holds
    `<kind>/<part>/<owner>` of routers, whose names end with a task or with one of its adapters. Shorter names are each
    a group.

    Attributes:
        groups: group -> its tensors by the rest of their names; `StoredTensors` are created when they are looked up.
    """

    def __init__(self, groups: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        self.groups: dict[str, Mapping[str, Tensor]] = dict(groups or {})

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> TensorGroups:
        """Return tensors by name in their groups."""
        if isinstance(tensors, TensorGroups):
            return tensors
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, inner = _position(name)
            groups.setdefault(group, {})[inner] = tensor
        return TensorGroups(groups)

    def __getitem__(self, name: str) -> Tensor:
        group, inner = _position(name)
        if inner not in self.groups.get(group, ()):
            raise KeyError(name)
        return self.groups[group][inner]

    def __contains__(self, name: object) -> bool:
        """Check for a name without creating a tensor, unlike the default."""
        if not isinstance(name, str):
            return False
        group, inner = _position(name)
        return inner in self.groups.get(group, ())

    def __iter__(self) -> Iterator[str]:
        return (_name(group, inner) for group, held in self.groups.items() for inner in held)

    def __len__(self) -> int:
        return sum(map(len, self.groups.values()))

    def __repr__(self) -> str:
        return f"TensorGroups({list(self)})"

    def __or__(self, other: Mapping[str, Tensor]) -> TensorGroups:
        """Merge as dicts do; groups that only one of them has stay unchanged."""
        mine, theirs = self.groups, TensorGroups.of(other).groups
        merged = {group: {**mine[group], **theirs[group]} for group in mine.keys() & theirs.keys()}
        return TensorGroups({**mine, **theirs, **merged})

    def under(self, start: str) -> Mapping[str, Tensor]:
        """Return the tensors whose names begin with `start`, by the rest of their names."""
        if start in self.groups:
            return self.groups[start]
        kind = start.partition("/")[0]
        tensors = {}
        for group, held in self.groups.items():
            for inner in held if group.startswith(kind) else ():
                name = _name(group, inner)
                if name.startswith(start):
                    tensors[name.removeprefix(start)] = held[inner]
        return tensors

    def select(self, keep: Callable[[str], bool]) -> TensorGroups:
        """Return the tensors whose names are kept; groups of which all are kept stay what they are."""
        groups: dict[str, Mapping[str, Tensor]] = {}
        for group, held in self.groups.items():
            inner = [name for name in held if keep(_name(group, name))]
            if inner:
                groups[group] = held if len(inner) == len(held) else {name: held[name] for name in inner}
        return TensorGroups(groups)


def _position(name: str) -> tuple[str, str]:
    """Return the group of a tensor, and its name there."""
    kind, _, rest = name.partition("/")
    first, slash, last = rest.partition("/")
    if not slash:
        return name, WHOLE
    if kind in ROUTERS:
        return f"{kind}//{_ADAPTER_NUMBER.sub('', last)}", rest
    return f"{kind}/{first}/", last


def _name(group: str, inner: str) -> str:
    kind, is_router, _ = group.partition("//")
    if is_router:
        return f"{kind}/{inner}"
    return f"{group}{inner}" if group.endswith("/") else group
