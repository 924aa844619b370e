"""Routers: a mixture for each text, without a task id where the kind allows it.

What it does not know: where adapters are stored, what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from raycl.errors import BankError
from raycl.types import Mixture

Owners = Mapping[str, tuple[str, ...]]
"""Adapter -> tasks that it was trained on."""


class Router(Protocol):
    """What every kind does."""

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """Weights `[B, N]` over the snapshot's adapters.

        Args:
            tasks: of each text where it is known; kinds that work without a task id ignore it.

        Raises:
            BankError: this kind needs what is not given.
        """
        ...


class SingleRouter:
    """One adapter for everything."""

    def __init__(self, owners: Owners) -> None:
        """Take the snapshot's only adapter.

        Raises:
            BankError: there are several, or none.
        """
        if len(owners) != 1:
            raise BankError(f"a snapshot with router 'single' must have one adapter, this one has {len(owners)}")
        self._weights = dict.fromkeys(owners, 1.0)

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """That one, fully."""
        return Mixture.same(self._weights, len(texts))


class TaskRouter:
    """Each task's own adapter: an upper reference that must be told the task."""

    def __init__(self, owners: Owners) -> None:
        self._names = tuple(owners)
        self._columns = {task: column for column, name in enumerate(owners) for task in owners[name]}

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """One-hot by the task's name."""
        if tasks is None:
            raise BankError("the snapshot's router is 'task', which must be told each text's task: name it")
        unknown = sorted(set(tasks) - self._columns.keys())
        if unknown:
            raise BankError(f"no adapter was trained on {', '.join(unknown)}: expected {', '.join(self._columns)}")
        columns = torch.tensor([self._columns[task] for task in tasks], dtype=torch.long)
        return Mixture(self._names, torch.nn.functional.one_hot(columns, len(self._names)).float())


ROUTERS: dict[str, type[SingleRouter] | type[TaskRouter]] = {"single": SingleRouter, "task": TaskRouter}
"""Kind in a snapshot -> class."""


def make_router(kind: str, owners: Owners) -> Router:
    """The router of that kind.

    Raises:
        BankError: an unknown kind, or adapters that do not fit it.
    """
    if kind not in ROUTERS:
        raise BankError(f"unknown router kind '{kind}': this version knows {', '.join(ROUTERS)}; upgrade raycl")
    return ROUTERS[kind](owners)
