"""Permissions to run code of others, and to reach their storage: given by the command, never by a file.

A model's folder can bring Python code, pickled weights can run some, and so can files that describe tasks of lm-eval.
A config, a sweep, a run or a snapshot of another author may request any of these; the user permits it on the command
line, and workers inherit that.

A request to a store carries the user's credentials or is signed with them, and an address can name any server. So
addresses in configs are printed before they are used, and refused where a record names them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from raycl import config as configs
from raycl.config import Tree
from raycl.config.names import shown
from raycl.errors import ConfigError

RISKS = {
    "trust_remote_code": "runs Python code that comes with the model",
    "allow_pickle": "reads pickled weights, which can run code",
    "allow_code": "runs code that the model generates",
    "include_path": "reads task files, which can run code",
}
"""Setting -> what it lets a model's author do."""


@dataclass(frozen=True)
class Permissions:
    """The permissions of the typed command."""

    trust_remote_code: bool = False
    allow_pickle: bool = False

    def refused(self, requested: Iterable[str]) -> list[str]:
        """Return those of the requested settings that are not allowed."""
        return [name for name in requested if not getattr(self, name)]


NONE_GIVEN = Permissions()
"""Permissions of a command line without any."""


def requested(tree: Tree) -> list[str]:
    """Return dotted paths of the settings of `RISKS` that a config tree turns on, at any depth."""
    return sorted(path for path, value in configs.flatten(tree).items() if value and path.rpartition(".")[2] in RISKS)


def require(paths: Iterable[str], overrides: Sequence[str], source: str, prefix: str = "") -> None:
    """Check that the command line allows what a config requests.

    Args:
        paths: see `requested`. overrides: `key.path=value` as typed. source: origin of the config, for the message.
        prefix: prefix of these paths on the command line (`base.` for sweeps).

    Raises:
        ConfigError: the command line does not allow it; the message names the setting that does.
    """
    typed: Tree = {}
    for override in overrides:
        if any(name in override for name in RISKS):
            configs.apply_override(typed, override)
    allowed = {path for path, value in configs.flatten(typed).items() if value is True or (value and _is_folder(path))}
    for path in paths:
        if f"{prefix}{path}" not in allowed:
            added, whose = ("FOLDER", "these files") if _is_folder(path) else ("true", "the model")
            raise ConfigError(
                f"{source} sets {path}, which {RISKS[path.rpartition('.')[2]]}: a file cannot allow that; add "
                f"{prefix}{path}={added} to the command if you trust the author of {whose}"
            )


def _is_folder(path: str) -> bool:
    return path.rpartition(".")[2] == "include_path"


def as_overrides(tree: Tree) -> list[str]:
    """Return overrides that allow everything that a config tree requests."""
    given = configs.flatten(tree)
    return [f"{path}={given[path] if _is_folder(path) else 'true'}" for path in requested(tree)]


log: logging.Logger = logging.getLogger("raycl")

TEXTS = ("labels", "words", "definition", "prompt", "system", "chat_template")
"""Settings that hold texts, which may look like addresses."""

HUB = "hf"
"""The scheme of the Hugging Face hub; such names cannot change the server."""


class Server(NamedTuple):
    """The server that an address leads to: the kind of store, its bucket or host, and what else determines it."""

    kind: str
    host: str
    query: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(address: str) -> Server | None:
        """Return the server of an address; None for a path of this machine."""
        if "://" not in address:
            return None
        try:
            parts = urlsplit(address.removeprefix("sql:"))
        except ValueError:
            return Server("", address)
        query = [
            parameter
            for parameter in parse_qsl(parts.query, keep_blank_values=True)
            if parameter != ("scheme", "https")
        ]
        host = parts.path if parts.scheme == "sqlite" else parts.netloc.rpartition("@")[2]
        return None if parts.scheme == "file" else Server(parts.scheme, host, tuple(sorted(query)))

    @property
    def address(self) -> str:
        query = f"?{urlencode(self.query, safe=':/')}" if self.query else ""
        return f"{self.kind}://{self.host}{query}" if self.kind else self.host


def check_no_secret(url: str) -> None:
    """Refuse the address of an endpoint that holds what must not be printed.

    Raises:
        ValueError: it has a user, a password or a query.
    """
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        raise ValueError(
            "url holds a user, a password or a query, which would end up in logs: expected http://HOST:PORT, and the "
            "endpoint's key in the environment variable that key_env names"
        )


def addresses(tree: Tree) -> dict[str, str]:
    """Return dotted path -> address, of all in a config."""
    return dict(_found(tree, ""))


def _found(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and "://" in value:
        yield path, value
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            if key not in TEXTS:
                yield from _found(inner, f"{path}.{key}" if path else str(key))


def announce(tree: Tree, own_address: str = "") -> None:
    """Log the servers that a config names, once in a process, before they are used.

    Args:
        own_address: address of the run or bank itself, which the user knows.
    """
    servers: dict[Server, list[str]] = {}
    for path, address in addresses(tree).items():
        if (server := Server.of(address)) is not None and server != Server.of(own_address):
            servers.setdefault(server, []).append(path)
    for server, paths in servers.items():
        _log_once(f"the config names {shown(server.address)}: {shown(paths[0])}{', ...' if paths[1:] else ''}")


@lru_cache(maxsize=1024)
def _log_once(line: str) -> None:
    log.warning("%s", line)


def require_named(tree: Tree, known: Iterable[str], source: str, setting: str) -> None:
    """Check that a record names no storage that the user has not named.

    Args:
        tree: content of the record. known: addresses that the user has named. source: origin of the record.
        setting: the setting that names more addresses, for the message.

    Raises:
        ConfigError: the record names other storage.
    """
    servers = set(map(Server.of, known))
    for path, address in addresses(tree).items():
        server = Server.of(address)
        if server is not None and server.kind != HUB and server not in servers:
            raise ConfigError(
                f"{source} names storage at {shown(server.address)} ({shown(path)}), which would be asked with your "
                f"credentials: a record cannot decide that; if it is right, allow it with {setting}"
            )
