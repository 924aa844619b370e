"""One backbone with the adapters of any number of snapshots, loaded side by side.

While a new snapshot is loaded, answers begun on the old one continue, in the same batches. An adapter is known on the
device by name and version, so that two snapshots share what they have in common and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.adapters.experts import linear_at
from raycl.adapters.head import MixedHead
from raycl.adapters.rows import StaticRows
from raycl.adapters.soft_prompts import MixedPrompts, PromptUse
from raycl.adapters.stack import Source
from raycl.backbone import Backbone
from raycl.backbone.roles import query_of
from raycl.bank import Snapshot
from raycl.data.prompts import Prompt
from raycl.errors import BankError, StorageError
from raycl.generation.task_prompts import TaskPrompts, check_templates, user_turns_of
from raycl.routing.router import Router, heads_of_tasks
from raycl.routing.routers import routed_text
from raycl.routing.unknown_texts import UnknownRule
from raycl.scoring.scored_task import recorded_settings
from raycl.serve.errors import UnavailableError
from raycl.types import Activation, AdapterState, Mixture, UnknownPolicy

if TYPE_CHECKING:
    from raycl.generation.prefix_cache import PrefixCache

log: logging.Logger = logging.getLogger(__name__)

MARK = "~"
"""Separates an adapter's name and version from the suffix that distinguishes it from another one of both."""

AHEAD_BYTES = 256 * 2**20
"""The most bytes of a snapshot's adapters that are prefetched."""


ELSEWHERE = PromptUse(is_here=False)


@dataclass(frozen=True, eq=False)
class LoadedSnapshot(TaskPrompts):
    """A snapshot that requests can be answered from; its `owners` go by names on the device.

    Attributes:
        source: adapter -> what it holds.
        keys: adapter -> its name on the device. names: the other way round.
        heads: task -> name on the device of the first adapter with its label head.
    """

    router: Router
    snapshot: Snapshot
    source: Source
    keys: Mapping[str, str]
    names: Mapping[str, str]
    heads: Mapping[str, str]

    @staticmethod
    def of(
        snapshot: Snapshot, router: Router, source: Source, mark: str = "", rule: UnknownRule | None = None
    ) -> LoadedSnapshot:
        """Ready to be added to a model.

        Args:
            mark: ends the names on the device, see `mark_of`.
            rule: the rule for texts of no learned task; None: that of its run's evaluation.

        Raises:
            BankError: a chat template does not work, or the router cannot follow the rule.
        """
        check_templates(snapshot)
        keys = {entry.name: f"{entry}{mark}" for entry in snapshot.adapters}
        owners = {keys[entry.name]: entry.tasks for entry in snapshot.adapters}
        return LoadedSnapshot(
            router,
            owners,
            {task.name: Prompt.of(task) for task in snapshot.tasks},
            routed_text(snapshot.router),
            rule or rule_of(snapshot, router),
            user_turns_of(snapshot),
            snapshot,
            source,
            keys,
            {key: name for name, key in keys.items()},
            heads_of_tasks(owners),
        )

    @cached_property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Task -> its labels; () where it has none."""
        return {task.name: tuple(task.labels or ()) for task in self.snapshot.tasks}

    @property
    def head_rule(self) -> Any:
        """The rule by which its label heads are mixed (`raycl.adapters.head.Rule`)."""
        return self.snapshot.router.settings.get("head_rule", "probability")

    @property
    def asks_for_task(self) -> bool:
        """Return whether a request must say which task its text is of."""
        return self.needs_task or self.router.reads_task or self.head_rule == "label_count"

    @property
    def concatenates_prompts(self) -> bool:
        """Return whether the soft prompts of a text's adapters stand one after another instead of being added up."""
        return self.snapshot.router.settings.get("prompt_mixing") == "concat"

    @property
    def prompt_uses(self) -> dict[str, PromptUse]:
        """Name on the device -> how its prompt is mixed; of concatenated ones the newest comes first."""
        learned = self.snapshot.router.settings.get("prompt_order", {})
        apart = self.concatenates_prompts and not self.prompts_follow
        return {key: PromptUse(apart, (-learned.get(name, 0), name)) for key, name in self.names.items()}

    @property
    def prompts_follow(self) -> bool:
        """Return whether the soft prompts of its adapters stand behind texts instead of in front of them."""
        return self.snapshot.router.settings.get("prompt_place") == "after"

    def prompt_positions(self, names: Collection[str] | None = None) -> int:
        """Return positions that soft prompts take beside a text.

        Args:
            names: adapters that are active for it; None: not known yet, so as many as its router activates at most.
        """
        known = self._prompt_lengths
        if not known:
            return 0
        lengths = sorted(known.values() if names is None else [known.get(name, 0) for name in names], reverse=True)
        if not self.concatenates_prompts:
            return max(lengths, default=0)
        return sum(lengths[: self.snapshot.router.settings.get("top_k") if names is None else None])

    @cached_property
    def _prompt_lengths(self) -> dict[str, int]:
        """Adapter -> positions of its soft prompt, of adapters that have one."""
        return {entry.name: entry.prompt[0] for entry in self.snapshot.adapters if entry.prompt}

    def mixture(self, texts: Sequence[str], tasks: Sequence[str] | None = None) -> Mixture:
        """Return the mixture of each text, by names on the device; adapters without weight are left out.

        Raises:
            BankError: the router needs the tasks, or does not know one.
        """
        return self.named(self.router.route(texts, tasks))

    def named(self, mixture: Mixture) -> Mixture:
        """Return a mixture of the snapshot's own names by names on the device.

        Raises:
            BankError: it names an adapter that the snapshot lacks.
        """
        chosen = (mixture.weights != 0).any(0).nonzero().flatten().tolist()
        missing = [name for column in chosen if (name := mixture.names[column]) not in self.keys]
        if missing:
            raise BankError(
                f"the router of snapshot {self.snapshot.number} chose {', '.join(missing)}, which the snapshot lacks: "
                "the snapshot is inconsistent, use another one"
            )
        names = tuple(self.keys[mixture.names[column]] for column in chosen)
        by_text = None if mixture.by_text is None else self.named(mixture.by_text)
        return replace(mixture, names=names, weights=mixture.weights[:, chosen], unpruned=None, by_text=by_text)


def rule_of(
    snapshot: Snapshot, router: Router, policy: UnknownPolicy | None = None, false_alarms: float | None = None
) -> UnknownRule:
    """Return the rule for texts of no learned task.

    Args:
        policy, false_alarms: see `UnknownRule`; None: as the run that made the snapshot was evaluated.

    Raises:
        BankError: the router cannot follow it.
    """
    recorded = recorded_settings(snapshot)
    policy, false_alarms = policy or recorded.unknown, false_alarms or recorded.false_alarms
    return UnknownRule.of(router, policy, false_alarms, f"snapshot {snapshot.number}")


def mark_of(snapshot: Snapshot, others: Iterable[LoadedSnapshot]) -> str:
    """Return a suffix that distinguishes a snapshot's adapters from other loaded ones of the same name and version.

    Empty unless the bank was emptied and filled again while it was served.
    """
    held = {other.keys[entry.name]: entry for other in others for entry in other.snapshot.adapters}
    marks = ("" if number == 0 else f"{MARK}{number}" for number in count())
    return next(m for m in marks if all(held.get(f"{entry}{m}", entry) == entry for entry in snapshot.adapters))


class MultiSnapshotModel:
    """The backbone with the adapters of all loaded snapshots.

    Attributes:
        stack: adapters over the backbone's linears, loaded onto the device when a mixture names them.
        alone: adapters that are no sum with others.
        prefixes: beginnings of prompts that were read, for prompts under the same mixtures.
        counts: mixtures opened, their rows and adapters, and how many of those were on the device already.
    """

    def __init__(self, backbone: Backbone, max_loaded_rows: int | None = None, prefix_bytes: int = 0) -> None:
        """Wrap the backbone.

        Args:
            max_loaded_rows: ranks of adapters on the device at once; None: no limit.
            prefix_bytes: bytes of `prefixes` at most; 0: nothing is kept.
        """
        from raycl.generation.prefix_cache import PrefixCache  # imports transformers

        self.backbone: Backbone = backbone.eval()
        self._all: list[LoadedSnapshot] = []
        self.counts: dict[str, int] = {"batches": 0, "rows": 0, "adapters": 0, "hits": 0, "misses": 0}
        self._sources: dict[str, tuple[Source, str]] = {}
        self.alone: set[str] = set()
        self.prefixes: PrefixCache = PrefixCache(prefix_bytes)
        self._copying: set[str] = set()
        self._ranks: dict[str, int] = {}
        self._prompts: dict[str, tuple[bool, PromptUse]] = {}
        self.stack: AdapterStack = AdapterStack(backbone.model, [], max_loaded_rows, self._fetch, query_of=query_of)
        self._room: StaticRows | None = None
        self._room_for: object = None
        self._room_number = 0
        if backbone.codec.needs_labels:
            backbone.head = MixedHead(self.stack, int(backbone.model.config.hidden_size))

    @property
    def loaded(self) -> dict[int, LoadedSnapshot]:
        """Number -> snapshot; of two that had the same number after each other the later one."""
        return {loaded.snapshot.number: loaded for loaded in self._all}

    def add(self, loaded: LoadedSnapshot) -> None:
        """Load a snapshot; no mixture may be active.

        Raises:
            BankError: it was made for a backbone without some of its linears, it reads texts otherwise, or its
                adapters have another activation than those loaded (or than each other).
        """
        snapshot = loaded.snapshot
        if loaded.rule.policy == "bare" and self.backbone.codec.needs_labels:
            raise BankError(
                f"unknown=bare cannot be used with snapshot {snapshot.number}, whose backbone is encoder-only and has "
                "no labels without adapters: expected nearest or refuse"
            )
        self._check_bos(snapshot)
        paths = sorted({path for layout in snapshot.layouts.values() for path in layout})
        copied = sorted({path for entry in snapshot.adapters for path in entry.copies})
        try:
            for path in (*paths, *copied):
                linear_at(self.backbone.model, path)  # all exist before the first is wrapped
            self.stack.use(self._activation(snapshot))
            self.stack.extend(paths)
            self.stack.copy_modules(copied)
        except AttributeError as error:
            raise BankError(
                f"snapshot {snapshot.number} adapts linears that this backbone lacks ({error}): it was made for "
                f"'{snapshot.backbone.name}'"
            ) from error
        if any(entry.prompt for entry in snapshot.adapters):
            self._place_prompts(loaded)
        self._prompts |= {key: (loaded.prompts_follow, use) for key, use in loaded.prompt_uses.items()}
        for name, key in loaded.keys.items():
            self._sources.setdefault(key, (loaded.source, name))
        self._ranks |= {loaded.keys[entry.name]: entry.rank for entry in snapshot.adapters}
        self.alone |= {loaded.keys[entry.name] for entry in snapshot.adapters if entry.is_alone}
        self._copying |= {loaded.keys[entry.name] for entry in snapshot.adapters if entry.copies}
        self._all.append(loaded)

    def _place_prompts(self, loaded: LoadedSnapshot) -> None:
        """Place soft prompts before or after texts; snapshots of both kinds may be loaded."""
        backbone = self.backbone
        width = int(backbone.model.get_input_embeddings().weight.shape[1])
        if loaded.prompts_follow and backbone.suffix is None:
            backbone.suffix = MixedPrompts(self.stack, width, partial(self._prompt_use, True))
        if not loaded.prompts_follow and backbone.prefix is None:
            backbone.prefix = MixedPrompts(self.stack, width, partial(self._prompt_use, False))

    def _prompt_use(self, follows: bool, key: str) -> PromptUse:
        """Return how an adapter's prompt is used behind texts, or in front of them."""
        where, use = self._prompts[key]
        return use if where == follows else ELSEWHERE

    def _check_bos(self, snapshot: Snapshot) -> None:
        learned = snapshot.provenance.get("config", {}).get("backbone", {}).get("bos", "tokenizer")
        if learned != (here := self.backbone.codec.bos):
            raise BankError(
                f"snapshot {snapshot.number} was learned with backbone.bos={learned} and this model reads texts with "
                f"bos={here}: serve the snapshot on its own"
            )

    def _activation(self, snapshot: Snapshot) -> Activation:
        """Return the activation of all loaded adapters; adapters of a head or prompt alone have none."""
        others = [loaded.snapshot for loaded in self._all]
        example = {
            entry.activation: entry for entries_of in (*others, snapshot) for entry in entries_of.adapters if entry.rank
        }
        if len(example) > 1:
            kinds = ", ".join(f"'{kind or 'none'}' ({example[kind]})" for kind in sorted(example))
            raise BankError(
                f"the adapters of snapshot {snapshot.number} and those loaded have activations {kinds}, but a model "
                "computes all of its adapters with one: make a snapshot for each, and serve one of them"
            )
        return next(iter(example), "")

    def drop(self, gone: LoadedSnapshot) -> None:
        """Unload a snapshot and the adapters that no other one has; no mixture may be active."""
        self._all = [loaded for loaded in self._all if loaded is not gone]
        self.prefixes.drop(gone)
        kept = {key for other in self._all for key in other.keys.values()}
        for name, key in gone.keys.items():
            if key in kept:
                if self._sources[key][0] is gone.source:
                    owner = next(other for other in self._all if key in other.keys.values())
                    self._sources[key] = (owner.source, name)
                continue
            del self._sources[key], self._ranks[key], self._prompts[key]
            self.alone.discard(key)
            self._copying.discard(key)
            if key in self.stack.states:
                self.stack.drop(key)

    def _fetch(self, key: str) -> AdapterState:
        source, name = self._sources[key]
        try:
            return source(name)
        except (BankError, StorageError) as error:
            raise UnavailableError(f"adapter {key} cannot be loaded: {error}") from error

    def ahead(self, loaded: LoadedSnapshot) -> list[str]:
        """Return the first adapters of a snapshot, up to `AHEAD_BYTES`: they are prefetched."""
        room, keys = AHEAD_BYTES, []
        for entry in loaded.snapshot.adapters:
            room -= entry.tensors.bytes
            if room < 0:
                break
            keys.append(loaded.keys[entry.name])
        return keys

    def prefetch(self, keys: Sequence[str]) -> None:
        """Load them onto the device if there is room; failures are logged, and raised for requests that need them."""
        for key in keys:
            has_room = self.stack.grows or self.stack.table.free >= self._ranks.get(key, 0)
            if key in self._sources and key not in self.stack.states and has_room:
                try:
                    self.stack.need([key])
                except UnavailableError as error:
                    log.warning("%s", error)
                    return

    def pin(self, keys: Sequence[str]) -> None:
        """Keep these adapters on the device until they are unpinned as often as they were pinned."""
        for key in keys:
            self.stack.table.pin(key)

    def unpin(self, keys: Sequence[str]) -> None:
        """Undo one `pin` of each."""
        for key in keys:
            self.stack.table.unpin(key)

    def rows(self, keys: Sequence[str]) -> int:
        """Return the loaded rows of these adapters together."""
        return sum(self._ranks[key] for key in keys)

    def fit(self, mixtures: Sequence[Mixture]) -> bool:
        """Return whether the adapters of all have room on the device together."""
        if self.stack.grows:
            return True
        names = dict.fromkeys(name for mixture in mixtures for name in mixture.names)
        return self.rows(tuple(names)) <= self.stack.table.capacity

    @contextmanager
    def activate(self, mixture: Mixture, rule: Any = "probability", heads: Sequence[str] = ()) -> Iterator[None]:
        """Activate a mixture for everything inside.

        Args:
            rule: rule of label heads. heads: adapter whose label head answers each example, for rule `label_count`.
        """
        if isinstance(self.backbone.head, MixedHead) and rule == "label_count":
            self.stack.need(tuple(dict.fromkeys(heads)))
        self._count(mixture)
        with self.stack.activate(replace(mixture, heads=tuple(heads)), head_rule=rule):
            yield

    @contextmanager
    def activate_static(self, mixture: Mixture, weights_SN: Tensor) -> Iterator[int]:
        """Activate a mixture without labels, at addresses that stay the same while the returned number does.

        Args:
            weights_SN: those of `mixture`, at the places where its examples are.
        """
        self._count(mixture)
        used = (mixture.weights != 0).any(0).tolist()
        self.stack.need([name for name, yes in zip(mixture.names, used, strict=True) if yes])
        copying = sorted(self._copying & self.stack.states.keys())
        rows, has_layers = self.rows(mixture.names), bool(self.stack.layers and self.stack.pool.rows)
        wanted = (
            tuple(self.stack.layers),
            self.stack.activation,
            has_layers,
            len(weights_SN),
            bool(self.alone),
            tuple(copying),
        )
        if self._room_for != wanted or (self._room is not None and self._room.rows < rows):
            most = 1 << max(4, (rows - 1).bit_length())  # a power of two, since growing costs a capture
            scaled = tuple(self.stack.layers) if self.alone else ()
            fresh = StaticRows(self.stack.pool, most, len(weights_SN), scaled, copying) if has_layers else None
            self._room, self._room_for, self._room_number = fresh, wanted, self._room_number + 1
        with self.stack.activate(Mixture(mixture.names, weights_SN), static=self._room):
            yield self._room_number

    def _count(self, mixture: Mixture) -> None:
        loaded = sum(name in self.stack.states for name in mixture.names)
        more = {"batches": 1, "rows": len(mixture.weights), "adapters": len(mixture.names)}
        more |= {"hits": loaded, "misses": len(mixture.names) - loaded}
        self.counts = {name: value + more[name] for name, value in self.counts.items()}
