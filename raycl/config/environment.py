"""Environment variables that a config file may read by `${oc.env:NAME}`.

A config of another author could put any variable, a key for example, into an address that the run then sends requests
to. So only folders of data and models are read, and what the command allows by name.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from raycl.errors import ConfigError

ALWAYS = ("RAYCL_DATA", "RAYCL_MODELS")
"""The variables of data and models in the shipped configs."""

_allowed: ContextVar[Collection[str]] = ContextVar("allowed environment variables", default=())
_lock = threading.Lock()


@contextmanager
def allowing(names: Collection[str]) -> Iterator[None]:
    """Allow config files to read these variables as well."""
    token = _allowed.set((*_allowed.get(), *names))
    try:
        yield
    finally:
        _allowed.reset(token)


@contextmanager
def reading(files: bool) -> Iterator[None]:
    """Restrict OmegaConf to the environment variables that are allowed.

    Args:
        files: the command named the config; False: it is a record, which reads no variable at all.
    """
    names = (*ALWAYS, *_allowed.get()) if files else ()

    def read(name: str, *default: Any) -> str | None:
        if name not in names:
            expected = f"expected {', '.join(names)}, or add --allow-env {name}" if files else "a record has none"
            raise ConfigError(f"it reads the environment variable '{name}', which may be a secret: {expected}")
        value: str | None = oc.env(name, *default)
        return value

    with _lock:  # OmegaConf's resolvers are global to the process
        OmegaConf.register_resolver("oc.env", read, replace=True)
        try:
            yield
        finally:
            OmegaConf.register_resolver("oc.env", oc.env, replace=True)
