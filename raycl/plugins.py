"""Plug-ins of other packages: methods, routers, modifiers, metrics, optimizers, file formats, orders of tasks.

A package names each of them in an entry point of the group of its kind, `raycl.methods` for a method. Why lazily: entry
points are read when a name is not built in, and a package is imported when it is used, so that commands start at once
and a package that is broken stops no run without it.
"""

import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any, Literal, get_args

from raycl.errors import PluginError

Kind = Literal["method", "router", "modifier", "metric", "optimizer", "format", "order"]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The group of entry points of a kind is `raycl.` and its plural: `raycl.methods`."""

Used = dict[str, str]
"""`method my-method` -> `my-package 1.0`: what a run uses of other packages."""


@dataclass(frozen=True)
class Plugin:
    """One entry point.

    Attributes:
        target: `module:attribute`. package, version: of the distribution that has it.
    """

    kind: Kind
    name: str
    target: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' of package '{self.package}' {self.version}"

    @property
    def source(self) -> str:
        """The package's name and version, such as `my-package 1.0`."""
        return f"{self.package} {self.version}"

    def loaded(self) -> Any:
        """Import the object that the entry point names.

        Raises:
            PluginError: its package cannot be imported, or has no such object.
        """
        entry = EntryPoint(self.name, self.target, group_of(self.kind))
        try:
            return entry.load()
        except Exception as error:
            raise PluginError(
                f"{self} cannot be used: importing {self.target} failed with {type(error).__name__}: "
                f"{' '.join(str(error).split())}; repair or uninstall the package"
            ) from error


def group_of(kind: Kind) -> str:
    """Return the group of entry points: `raycl.methods`."""
    return f"raycl.{kind}s"


def installed(kind: Kind) -> tuple[Plugin, ...]:
    """Return all entry points of a kind, by name; none of them is imported."""
    return tuple(plugin for plugin in _installed(tuple(map(_changed, sys.path))) if plugin.kind == kind)


def names(kind: Kind) -> list[str]:
    """Return the names that packages give for a kind."""
    return list(dict.fromkeys(plugin.name for plugin in installed(kind)))


@dataclass(frozen=True)
class Names(Collection[str]):
    """The names of a kind: built-in ones, and those of packages, which are looked up for the others alone."""

    kind: Kind
    builtin: Collection[str]

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or (isinstance(name, str) and find(self.kind, name) is not None)

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from (name for name in names(self.kind) if name not in self.builtin)

    def __len__(self) -> int:
        return len(list(iter(self)))


def find(kind: Kind, name: str) -> Plugin | None:
    """Return the entry point of a name; None: no installed package has it.

    Raises:
        PluginError: several packages have it.
    """
    having = [plugin for plugin in installed(kind) if plugin.name == name]
    if len(having) > 1:
        packages = " and ".join(f"'{plugin.package}' {plugin.version}" for plugin in having)
        raise PluginError(f"{kind} '{name}' comes from packages {packages}: uninstall all but one of them")
    return having[0] if having else None


def load(kind: Kind, name: str, expected: type[Any] = object) -> Any:
    """Return what a package has under a name; None: no installed package has it.

    Args:
        expected: class of metrics and orders, base class of all others; formats are functions.

    Raises:
        PluginError: it cannot be imported, or is something else.
    """
    plugin = find(kind, name)
    if plugin is None:
        return None
    loaded, wanted = plugin.loaded(), f"{expected.__module__}.{expected.__name__}"
    if kind == "format":
        fits, wanted = callable(loaded), "a function"
    elif kind in ("metric", "order"):
        fits, wanted = isinstance(loaded, expected), f"an instance of {wanted}"
    else:
        fits, wanted = isinstance(loaded, type) and issubclass(loaded, expected), f"a subclass of {wanted}"
    if not fits:
        raise PluginError(f"{plugin} is {loaded!r}: expected {wanted}")
    return loaded


def used(names_by_kind: Mapping[Kind, list[str]], builtin: Mapping[Kind, Collection[str]]) -> Used:
    """Return those of the names that are not built in, each with its package; names of no package are left out."""
    plugins = [
        plugin
        for kind, chosen in names_by_kind.items()
        for name in dict.fromkeys(chosen)
        if name not in builtin[kind] and (plugin := find(kind, name)) is not None
    ]
    return {f"{plugin.kind} {plugin.name}": plugin.source for plugin in plugins}


def require(wanted: Used) -> None:
    """Check that this process has the packages that a run uses, in the versions that its driver has.

    Raises:
        PluginError: one is missing, or has another version.
    """
    for what, source in wanted.items():
        kind, _, name = what.partition(" ")
        plugin = next((find(known, name) for known in KINDS if known == kind), None)
        if plugin is None or plugin.source != source:
            package, _, version = source.rpartition(" ")
            there = "does not have it" if plugin is None else f"has {plugin.source}"
            raise PluginError(
                f"{kind} '{name}' comes from package '{package}' {version}, and the worker on {socket.gethostname()} "
                f"{there}: install it there, pip install {package}=={version}"
            )


def _changed(folder: str) -> tuple[str, int]:
    """Return a folder of `sys.path` and when something was last installed there; 0: it is no folder."""
    with suppress(OSError):
        return folder, Path(folder).stat().st_mtime_ns
    return folder, 0


@lru_cache(maxsize=8)
def _installed(path: tuple[tuple[str, int], ...]) -> tuple[Plugin, ...]:
    """Read all distributions on `sys.path`; of two with one name the first counts, as for imports."""
    seen, plugins = set[str](), list[Plugin]()
    for distribution in distributions(path=[folder for folder, _ in path]):
        text = distribution.read_text("entry_points.txt")
        if text is None or "[raycl." not in text:
            continue
        package = distribution.metadata["Name"] or "unknown"
        if (folded := package.lower().replace("_", "-")) in seen:
            continue
        version = distribution.metadata["Version"] or "unknown"
        for kind in KINDS:
            entries = distribution.entry_points.select(group=group_of(kind))
            plugins += [Plugin(kind, entry.name, entry.value, package, version) for entry in entries]
        seen.add(folded)
    return tuple(sorted(plugins, key=lambda plugin: (KINDS.index(plugin.kind), plugin.name, plugin.package)))
