"""Permissions to run code of others: given by the command that trains or serves, never by a file.

A model's folder can bring Python code, pickled weights can run some, and so can files that describe tasks of lm-eval.
A config, a sweep, a run or a snapshot of another author may request any of these; the user permits it on the command
line, and workers inherit that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raycl import config as configs
from raycl.config import Tree
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
    return sorted(path for path, value in configs.flatten(tree).items() if _is_risk(path) and value)


def _is_risk(path: str) -> bool:
    return path.rpartition(".")[2] in RISKS


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
