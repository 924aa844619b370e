"""Routers: a mixture for each text, without a task id where the kind allows it.

What it does not know: where adapters are stored, what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from raycl.errors import BankError, RetrievalError
from raycl.retrieval.attention import AttentionRouter
from raycl.retrieval.encoder import ASKED_TEXTS, EncoderConfig, SentenceEncoder
from raycl.retrieval.memory_slots.slots import SlotRouter
from raycl.types import Mixture, RouterState

Owners = Mapping[str, tuple[str, ...]]
"""Adapter -> tasks that it was trained on."""


class Router(Protocol):
    """What every kind does.

    Attributes:
        chooses: the text, or its task, decides; False: every text gets the same mixture.
    """

    chooses: bool

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

    chooses = False

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


class SumRouter:
    """Every adapter at once, for methods that learn each one on top of all earlier ones (O-LoRA)."""

    chooses = False

    def __init__(self, owners: Owners) -> None:
        self._weights = dict.fromkeys(owners, 1.0)

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """All of them, fully."""
        return Mixture.same(self._weights, len(texts))


class TaskRouter:
    """Each task's own adapter: an upper reference that must be told the task."""

    chooses = True

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


class TextRouter:
    """Keys or discriminant: the text alone decides."""

    chooses = True

    def __init__(self, router: SlotRouter, encoder: SentenceEncoder) -> None:
        self.router, self.encoder = router, encoder

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """By each text's query; with `task_id`, among the slots of its own task alone."""
        return self.router.route(self.encoder.embed(texts), tasks if self.router.config.task_id else None)

    def ood_score(self, texts: Sequence[str]) -> list[float] | None:
        """From 0 to 1 for each text (`SlotRouter.ood_score`); None: no texts were kept to compare with."""
        return self.router.ood_score(self.encoder.embed(texts)).tolist() if self.router.samples else None


def _from_text(state: RouterState, owners: Owners, cache: Path | None) -> Router:
    if state.encoder is None:
        raise BankError(f"a snapshot with router '{state.kind}' must name its sentence encoder, this one does not")
    encoder = SentenceEncoder(EncoderConfig(**{"layer": "last", **state.encoder}), cache, keeps=ASKED_TEXTS)
    if encoder.fingerprint != state.encoder_sha256:
        raise RetrievalError(
            f"the keys were made with encoder '{encoder.config.name}' ({state.encoder_sha256[:12]}), what has "
            f"that name now is another ({encoder.fingerprint[:12]}): install the right one"
        )
    return TextRouter(SlotRouter.restored(state), encoder)


ROUTERS: dict[str, Any] = {
    "single": lambda state, owners, cache: SingleRouter(owners),
    "sum": lambda state, owners, cache: SumRouter(owners),
    "task": lambda state, owners, cache: TaskRouter(owners),
    "keys": _from_text,
    "discriminant": _from_text,
    "attention": lambda state, owners, cache: AttentionRouter.restored(state),
}
"""Kind in a snapshot -> what makes it."""


NEEDS_BACKBONE: frozenset[str] = frozenset({"attention"})
"""Kinds whose queries come from the backbone's own embeddings: they run beside the model, not apart from it."""


def make_router(state: RouterState, owners: Owners, cache: Path | None = None) -> Router:
    """The router of that kind.

    Raises:
        BankError: an unknown kind, or adapters that do not fit it. RetrievalError: another encoder.
    """
    if state.kind not in ROUTERS:
        raise BankError(f"unknown router kind '{state.kind}': this version knows {', '.join(ROUTERS)}; upgrade raycl")
    made: Router = ROUTERS[state.kind](state, owners, cache)
    return made


def without(state: RouterState, task: str) -> RouterState:
    """The router with a task taken out: its keys, its statistics."""
    slots = state.kind != "attention"
    kept = {name: value for name, value in state.tensors.items() if _owner(name, slots) != task}
    return RouterState(state.kind, state.settings, kept, state.encoder, state.encoder_sha256)


def _owner(name: str, slots: bool) -> str:
    """The task of `key/<task>.<slot>` or `<part>/<task>` (tasks' names may hold dots), "" for what all share."""
    part, _, owner = name.partition("/")
    return owner.rpartition(".")[0] if slots and part == "key" else owner
