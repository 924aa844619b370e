"""The kinds of router, found in a snapshot by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from raycl.bank.manifest import RouterInfo
from raycl.config import validate
from raycl.errors import BankError, RetrievalError, meant
from raycl.plugins import Names, find, load
from raycl.routing.attention import AttentionRouter
from raycl.routing.class_gaussians import ClassGaussiansRouter
from raycl.routing.gates import GateRouter
from raycl.routing.pools import ExpertRouter, PromptPoolRouter
from raycl.routing.router import Need, Owners, PromptRouter, Router, columns_of
from raycl.routing.sentence_encoder import SERVED_TEXTS, EncoderConfig, SentenceEncoder
from raycl.routing.slots import SlotRouter
from raycl.routing.statistics import BareTexts
from raycl.routing.task_keys import GivenTaskKeysRouter, TaskKeysRouter
from raycl.types import Mixture, RouterState, RouterText


class SumRouter(Router):
    """Every adapter at once, for methods that learn each one on top of all earlier ones (O-LoRA)."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    chooses = False

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> Self:
        """Over the snapshot's adapters."""
        return cls(owners)

    def __init__(self, owners: Owners) -> None:
        self._weights = dict.fromkeys(owners, 1.0)

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """Return all of them, by their weights."""
        return Mixture.same(self._weights, len(texts))


class SingleRouter(SumRouter):
    """One adapter for all texts."""

    def __init__(self, owners: Owners) -> None:
        """Take the snapshot's only adapter.

        Raises:
            BankError: there are several, or none.
        """
        if len(owners) != 1:
            raise BankError(f"a snapshot with router 'single' must have one adapter, this one has {len(owners)}")
        super().__init__(owners)


class WeightedSumRouter(SumRouter):
    """Every adapter at once, each with a learned weight that is the same for all texts (SD-LoRA)."""

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> Self:
        """Restore the router over the adapters that have a weight.

        Raises:
            BankError: an adapter of the snapshot has none.
        """
        weights = {name.partition("/")[2]: float(value) for name, value in state.tensors.items()}
        if missing := sorted(owners.keys() - weights.keys()):
            raise BankError(
                f"router 'weighted_sum' has no weight of {', '.join(missing)}: the snapshot is inconsistent"
            )
        router = cls(owners)
        router._weights = {name: weights[name] for name in owners}
        return router


class TaskRouter(Router):
    """Each task's own adapter: an upper reference that needs the task id."""

    needs: ClassVar[frozenset[Need]] = frozenset({"task_id"})
    chooses = True
    kind: ClassVar[str] = "task"

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> Self:
        return cls(owners)

    def __init__(self, owners: Owners) -> None:
        self._names = tuple(owners)
        self._columns = {task: column for column, name in enumerate(owners) for task in owners[name]}

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """Return one-hot by the task's name."""
        columns = columns_of(self.kind, self._columns, tasks)
        return Mixture(self._names, torch.nn.functional.one_hot(columns, len(self._names)).float())


class ProgressiveRouter(TaskRouter):
    """Each task's own prompt with those of all tasks that were learned before it (Progressive Prompts)."""

    kind: ClassVar[str] = "progressive"

    @classmethod
    def restored(
        cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()
    ) -> ProgressiveRouter:
        places = state.settings["prompt_order"]
        return cls({name: owners[name] for name in sorted(owners, key=lambda name: places[name])})

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """Return weight 1 for the prompt of the task by its name, and for all earlier ones."""
        mixture = super().route(texts, tasks)
        return Mixture(mixture.names, mixture.weights.flip(1).cumsum(1).flip(1))


class TextRouter(Router):
    """Keys or discriminant: the mixture is computed from the text alone."""

    needs: ClassVar[frozenset[Need]] = frozenset({"text"})
    chooses = True
    encoder: SentenceEncoder

    def __init__(self, router: SlotRouter, encoder: SentenceEncoder, owners: Owners) -> None:
        self.router = router
        self.encoder = encoder
        owned = {task_name: owners.get(router.adapters(task_name)[0], ()) for task_name in router.tasks}
        self._phases = {task: task_name for task_name, tasks in owned.items() for task in tasks}
        if router.samples:
            router.calibrated()  # before the first text

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """Route by each text's query; with `task_id`, among the slots of its own task alone.

        Without kept texts there are no out-of-distribution scores.
        """
        queries_BC, only = self.encoder.embed(texts), None
        if tasks is not None and self.router.config.task_id:
            only = [self._phases.get(task, task) for task in tasks]
        return self.router.route_scored(queries_BC, only)

    def unknown_above(self, false_alarms: float) -> float:
        return self.router.calibrated().threshold(false_alarms)

    @property
    def reads_task(self) -> bool:
        """Return whether the router was configured with `task_id`."""
        return self.router.config.task_id

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> Self:
        if state.encoder is None:
            raise BankError(f"a snapshot with router '{state.kind}' must name its sentence encoder, this one does not")
        config = validate(EncoderConfig, {"layer": "last", **state.encoder})
        same = [loaded for loaded in encoders if (loaded.config, loaded.fingerprint) == (config, state.encoder_sha256)]
        encoder = same[0] if same else SentenceEncoder(config, keeps=SERVED_TEXTS)
        if encoder.fingerprint != state.encoder_sha256:
            raise RetrievalError(
                f"encoder hash mismatch: the keys were computed with '{encoder.config.name}' "
                f"({state.encoder_sha256[:12]}), found {encoder.fingerprint[:12]} under that name: install the original"
            )
        return cls(SlotRouter.restored(state), encoder, owners)

    @classmethod
    def selected(cls, state: RouterState, dev: Mapping[str, Tensor]) -> RouterState:
        """Return the state with keys or discriminant, whichever gives the slots of dev texts' own tasks more weight."""
        router = SlotRouter.restored(state)
        for task in router.tasks:
            router.hold_out(task, dev[task])
        router.select()
        return replace(state, kind=router.kind)

    @classmethod
    def own_weights(cls, state: RouterState, adapters: Collection[str]) -> dict[str, float] | None:
        router = SlotRouter.restored(state)
        owned = (task for task in router.tasks if set(router.adapters(task)) == set(adapters))
        task = next(owned, None)
        return None if task is None else router.own_weights(task)

    @classmethod
    def with_task(
        cls, state: RouterState, task: str, queries_BC: Tensor, select: bool
    ) -> tuple[RouterState, list[str]]:
        """Return the state with a task in closed form (`SlotRouter.add_by_examples`), and the names of its slots.

        Raises:
            BankError: the router has the task already.
        """
        router = SlotRouter.restored(state)
        if task in router.tasks:
            raise BankError(f"the router selects a task '{task}' already: expected another name")
        router.add_by_examples(task, queries_BC)
        if select:
            router.dev = {**router.samples, task: queries_BC}
            router.select()
        settings = {**state.settings, **router.settings()}
        changed = replace(state, kind=router.kind, settings=settings, tensors=router.tensors())
        return changed, router.adapters(task)

    @classmethod
    def task_of(cls, tensor: str) -> str:
        """Return the task of `key/<task>.<slot>` or `<part>/<task>` (names of tasks may contain dots)."""
        part, _, owner = tensor.partition("/")
        return owner.rpartition(".")[0] if part == "key" else owner


ROUTERS: dict[str, type[Router]] = {
    "single": SingleRouter,
    "sum": SumRouter,
    "task": TaskRouter,
    "keys": TextRouter,
    "discriminant": TextRouter,
    "attention": AttentionRouter,
    "prompt_pool": PromptPoolRouter,
    "weighted_sum": WeightedSumRouter,
    "experts": ExpertRouter,
    "gates": GateRouter,
    "progressive": ProgressiveRouter,
    "task_keys": TaskKeysRouter,
    "task_keys_given": GivenTaskKeysRouter,
    "class_gaussians": ClassGaussiansRouter,
}
"""Kind in a snapshot -> its class."""


ROUTER_NAMES = Names("router", ROUTERS)
"""Built-in kinds and those of packages."""


ROUTER_TEXT = "router_text"
"""Setting of a router's state that names the text that it was fitted on."""

READS_STATES: frozenset[Need] = frozenset({"embeddings", "hidden_states"})
"""Needs of routers that read texts by the backbone."""


KindOfRouter = RouterState | RouterInfo
"""The state of a router, or its entry in a snapshot."""


def router_class(of: KindOfRouter) -> type[Router]:
    """Return the class of a kind of router: of `ROUTERS`, else of an installed package.

    Raises:
        BankError: an unknown kind, or one of a package that is not installed here. PluginError: of one that cannot be
            used.
    """
    router = ROUTERS.get(of.kind) or load("router", of.kind, Router)
    if router is None and of.package:
        package, _, version = of.package.rpartition(" ")
        raise BankError(
            f"router '{of.kind}' comes from package '{package}' {version}, which is not installed here: pip install "
            f"{package}=={version}"
        )
    if router is None:
        raise BankError(
            f"unknown router kind '{of.kind}': {meant(of.kind, ROUTER_NAMES)}; upgrade raycl, or install the package "
            "that it comes from"
        )
    return router


def with_package(state: RouterState) -> RouterState:
    """Return the state with the package that its kind comes from."""
    plugin = None if state.kind in ROUTERS else find("router", state.kind)
    return state if plugin is None else replace(state, package=plugin.source)


def with_text(state: RouterState, text: RouterText | None) -> RouterState:
    """Return the state with the text that the router was fitted on, where it reads texts."""
    return state if text is None else replace(state, settings={**state.settings, ROUTER_TEXT: text})


def routed_text(of: KindOfRouter) -> RouterText:
    """Return the text that a router was fitted on; where its state does not say, what its kind reads.

    Raises:
        BankError, PluginError: see `router_class`.
    """
    own: RouterText = "prompt" if READS_STATES & router_class(of).needs else "input"
    text: RouterText = of.settings.get(ROUTER_TEXT, own)
    return text


def make_router(state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> Router:
    """Return the router of a snapshot.

    Args:
        encoders: those that are loaded; the router's own is used if it is among them.

    Raises:
        BankError, PluginError: see `router_class`; or adapters that do not fit it. RetrievalError: another encoder.
    """
    router = router_class(state).restored(state, owners, encoders)
    if isinstance(router, PromptRouter):
        router.bare = BareTexts.of(state.tensors)
    return router


def without(state: RouterState, task: str) -> RouterState:
    """Return the router's state without a task: its keys, its statistics and its name are removed.

    Raises:
        BankError: an unknown kind.
    """
    task_of, settings = router_class(state).task_of, dict(state.settings)
    for key in ("tasks", "prompt_order"):
        if key in settings:
            held = settings[key]
            left = [task_name for task_name in held if task_name != task]
            settings[key] = {task_name: held[task_name] for task_name in left} if isinstance(held, dict) else left
    tensors = {name: value for name, value in state.tensors.items() if task_of(name) != task}
    return replace(state, settings=settings, tensors=tensors)
