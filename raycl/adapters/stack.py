"""All adapters of one model: attached to its linears, loaded on its device or in training, and the active mixture.

with stack.activate(mixture):   # stays active until backward has ended: recomputation reads it again
    loss = model(...)
    loss.backward()
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raycl.adapters.experts import PATH, StackedExperts
from raycl.adapters.formula import SelfActivation
from raycl.adapters.head import Rule as HeadRule
from raycl.adapters.layer import (
    AttentionQueries,
    CopiedModule,
    StackedLora,
    TrainedUpdate,
    adapted_norms,
    base_dtype,
    linear_shape,
    plain_weight,
)
from raycl.adapters.plan import MixturePlan, gate_of, neighbours, own_form
from raycl.adapters.rows import RowPool, RowTable, StaticRows
from raycl.adapters.state import check_alone, check_copies, check_fits
from raycl.errors import AdapterError
from raycl.types import COPY, Activation, AdapterState, Mixture

Source = Callable[[str], AdapterState]
"""Returns the state of an adapter by name; called when a mixture names an adapter that is not loaded."""

QueryOf = Callable[[nn.Module, str], str]
"""Returns the path of the query projection that belongs to an attention layer's output projection of a model."""

Init = Callable[[Tensor, int], None]
"""Fills A `[r, D]` of a linear; the second argument is the linear's number of outputs."""

Start = Callable[[Tensor, int, float], tuple[Tensor, Tensor]]
"""Returns A `[r, D]` and B `[O, r]` that training begins with, for a weight `[O, D]`, a rank and a scale."""

Sizes = Mapping[str, tuple[int, float]]
"""Path of a linear -> rank and scale of its updates, where they differ from those of others."""


class AdapterStack:
    """Adapters over the linears of `model`.

    Attributes:
        layers: path of a linear in the model -> the layer that took its place.
        experts: path of the experts of a block -> what took their place, where adapters adapt some.
        copied: path of a module in the model -> what took its place, for adapters with copies of it.
        plan: the active mixture, prepared; None for the bare backbone.
        is_open: a mixture is active. heads: its heads (`Mixture.heads`).
        table: which loaded rows belong to which adapter.
        static: preallocated rows of the active mixture, for compiled models; None: its rows are of any number.
        head_rule: how label heads are mixed while the mixture is active; None: as each head was made.
        dropout: probability on the input of adapters in training.
        activation: activation of all its adapters, which are computed together.
        self_activation: what it does, where it is of one memory of all rows; None: each row is for itself.
        detach_loaded: no gradient flows through loaded adapters into the layers below them; values stay.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Sequence[str],
        rows: int | None = None,
        source: Source | None = None,
        activation: Activation = "",
        query_of: QueryOf | None = None,
    ) -> None:
        """Put a `StackedLora` in the place of each linear.

        Args:
            paths: paths of linears (`raycl.backbone.roles.linear_names`, `raycl.adapters.experts.expert_names`).
            rows: loaded rows (ranks added up); None: no limit.
            query_of: finds query projections, for stacks of prefixes (`raycl.backbone.roles.query_of`).

        Raises:
            BackboneError: `query_of` finds no query projection.
        """
        self.model = model
        self.layers: dict[str, StackedLora] = {}
        self.activation: Activation = activation
        self.self_activation: SelfActivation | None = SelfActivation.of(activation)
        self.experts: dict[str, StackedExperts] = {}
        self.copied: dict[str, CopiedModule] = {}
        self._query_of = query_of
        self._hooks: list[RemovableHandle] = []
        self._attach(paths)
        self.grows: bool = rows is None
        self.pool: RowPool = RowPool({path: _shape(layer) for path, layer in self.layers.items()}, rows or 0)
        self.table: RowTable = RowTable(rows or 0)
        self.source = source
        self.detach_loaded = False
        self.states: dict[str, AdapterState] = {}
        self._unwritten: set[str] = set()
        self._ratios: dict[str, dict[str, Tensor]] = {}
        self._copies: dict[str, dict[str, Tensor]] = {}
        self.trainable: dict[str, int] = {}
        self.trainable_scale: float = 1.0
        self.dropout: float = 0.0
        self.plan: MixturePlan | None = None
        self.static: StaticRows | None = None
        self.head_rule: HeadRule | None = None
        self.is_open: bool = False
        self.heads: tuple[str, ...] = ()

    def _attach(self, paths: Sequence[str]) -> None:
        self._attach_experts(paths)
        for path in paths:
            base = self.model.get_submodule(path)
            assert not isinstance(base, StackedLora), f"'{path}' has a stack already"
            queries = self._queries(path) if self.activation == "softmax" else None
            self.layers[path] = StackedLora(base, self, path)
            self.layers[path].queries = queries
            self.model.set_submodule(path, self.layers[path])

    def _attach_experts(self, paths: Sequence[str]) -> None:
        """Make the linears of experts that are named modules of the model."""
        for path in dict.fromkeys(match["module"] for match in map(PATH.fullmatch, paths) if match):
            if path not in self.experts:
                block = self.model.get_submodule(path.rpartition(".")[0])
                self.experts[path] = StackedExperts(self.model.get_submodule(path), self)
                self._hooks.append(block.register_forward_pre_hook(self.experts[path].count_rows))
                self.model.set_submodule(path, self.experts[path])

    def _queries(self, path: str) -> AttentionQueries:
        """Return those of the attention layer whose output projection is at `path`, kept in each forward pass."""
        assert self._query_of is not None, "a stack of prefixes needs `query_of`"
        projection = self._query_of(self.model, path)
        config: Any = self.model.config
        heads = int(config.num_attention_heads)
        attention = self.model.get_submodule(projection.rpartition(".")[0])
        width = linear_shape(self.model.get_submodule(projection))[1]
        queries = AttentionQueries(heads, float(getattr(attention, "scaling", (width // heads) ** -0.5)))
        self._hooks.append(self.model.get_submodule(projection).register_forward_hook(queries))
        return queries

    def use(self, activation: Activation) -> None:
        """Set the activation of all adapters; loaded adapters must have it already."""
        if activation == self.activation:
            return
        paths, copied = list(self.layers), list(self.copied)
        self.detach()
        self.layers, self.copied, self.activation = {}, {}, activation
        self.self_activation = SelfActivation.of(activation)
        self._attach(paths)
        self.copy_modules(copied)
        self._renew_pool()

    def extend(self, paths: Sequence[str]) -> None:
        """Wrap more linears of the model; loaded adapters stay loaded and have no effect there."""
        assert not self.is_open, "a mixture is active: extend before"
        if fresh := [path for path in paths if path not in self.layers]:
            self._attach(fresh)
            self._renew_pool()

    def copy_modules(self, paths: Sequence[str]) -> None:
        """Let adapters have copies of these embeddings and linears."""
        for path in paths:
            if path not in self.copied:
                self.copied[path] = CopiedModule(self.model.get_submodule(path), self, path)
                self.model.set_submodule(path, self.copied[path])

    def _renew_pool(self) -> None:
        self.pool = RowPool({path: _shape(layer) for path, layer in self.layers.items()}, self.pool.rows)
        self._unwritten = set(self.states)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # ---- loaded adapters: frozen, on the device --------------------------------------------------------------

    def load(self, name: str, state: AdapterState, keep: Sequence[str] = (), later: bool = False) -> None:
        """Load an adapter, evicting others if rows are short. Its weights are copied when a mixture first names it.

        Args:
            keep: adapters that must stay.
            later: its rows are allocated, and it is checked, when a mixture first names it; for stacks without a limit.

        Raises:
            AdapterError: it does not fit the model or has another activation, its name is taken, or there is no room.
        """
        if name in self.states or name in self.trainable:
            raise AdapterError(f"adapter '{name}' is on the device already: drop it before loading another version")
        if state.rank and state.activation != self.activation:
            raise AdapterError(
                f"adapter '{name}' has activation '{state.activation or 'none'}', but the adapters of this stack have "
                f"'{self.activation or 'none'}' and are computed together: load it into a stack of its own kind"
            )
        assert self.grows or not later, "rows are limited: load an adapter when it is used"
        if not later:
            self._place(name, state, keep)
        self.states[name] = state
        self._unwritten.add(name)

    def _place(self, name: str, state: AdapterState, keep: Sequence[str]) -> None:
        check_fits(name, state, {path: (layer.inputs, layer.outputs) for path, layer in self.layers.items()})
        check_copies(name, state, {path: module.base for path, module in self.copied.items()})
        if self.grows and self.table.free < state.rank:
            more = max(2 * self.table.capacity, self.table.capacity + state.rank - self.table.free)
            self.table.grow(more)
            self.pool.grow(more)
        evicted = self.table.evicted
        self.table.allocate(name, state.rank, keep)
        if self.table.evicted > evicted:
            for gone in self.states.keys() - self.table.rows.keys():
                self.drop(gone)

    def drop(self, name: str) -> None:
        """Unload an adapter and free its rows."""
        del self.states[name]
        self._ratios.pop(name, None)
        self._copies.pop(name, None)
        self._unwritten.discard(name)
        if name in self.table.rows:
            self.table.remove(name)

    def loaded_copy(self, name: str, path: str) -> Tensor | None:
        """Return a loaded adapter's weight of a module, on its device; None where it has none."""
        copies, state = self._copies.setdefault(name, {}), self.states[name]
        if path not in copies and path in state.copies:
            copies[path] = state.copies[path].to(self.copied[path].weight)
        return copies.get(path)

    def magnitude_ratio(self, name: str, path: str) -> Tensor | None:
        """Return `[O]`, a loaded adapter's magnitudes divided by the norms of the weight's rows; None where it adapts
        no such linear."""
        ratios, state = self._ratios.setdefault(name, {}), self.states[name]
        if path not in ratios and path in state.magnitudes:
            base = self.layers[path].base
            norms = adapted_norms(base, *state.linears[path], state.scale)
            ratios[path] = state.magnitudes[path].to(norms) / norms
        return ratios.get(path)

    def need(self, names: Sequence[str]) -> None:
        """Load and write all of `names`; none of them evicts another."""
        for name in names:
            if name not in self.states:
                if self.source is None:
                    known = ", ".join([*self.trainable, *self.states]) or "none"
                    raise AdapterError(f"adapter '{name}' is not loaded: expected some of {known}")
                self.load(name, self.source(name), keep=names)
            if name not in self.table.rows:
                self._place(name, self.states[name], names)
            if name in self._unwritten:
                self.pool.write(self.table.rows[name], self.states[name].linears)
                self._unwritten.remove(name)
            self.table.rows.move_to_end(name)

    # ---- adapters in training --------------------------------------------------------------------------------

    def begin_training(
        self,
        ranks: Mapping[str, int],
        scale: float,
        init: Init | None = None,
        dropout: float = 0.0,
        sizes: Sizes | None = None,
        start: Start | None = None,
        magnitudes: bool = False,
        copies: Sequence[str] = (),
    ) -> None:
        """Allocate trainable adapters: A drawn by `init`, B zero, so the initial update is zero.

        Args:
            ranks: adapter -> rank. scale: scale of every adapter.
            init: fills A, a `[r, D]` tensor on the CPU, in place; its second argument is the number of outputs. The
                same seed gives the same A on every device. None: there are no linears.
            sizes: ranks, of each adapter, and scales of some linears.
            start: gives A and B of the one adapter instead; their product is subtracted from the update.
            magnitudes: the one adapter trains the norms of the adapted weights' rows too (DoRA).
            copies: paths of embeddings and linears of which the one adapter trains a copy.
        """
        self.trainable, self.trainable_scale, self.dropout = dict(ranks), scale, dropout
        if sizes and self.layers:
            widest = max(sizes[path][0] if path in sizes else 0 for path in self.layers)
            others = self.layers.keys() - sizes.keys()
            self.trainable = {name: max(widest, rank if others else 0) for name, rank in ranks.items()}
        for path, layer in self.layers.items():
            own_rank, own_scale = (sizes or {}).get(path, (0, scale))
            own = [own_rank or rank for rank in ranks.values()]
            columns = _columns([*self.trainable.values()], own, layer.weight.device) if sizes else None
            layer.update = TrainedUpdate(tuple(own), own_scale, own_scale / scale, columns)
            self._allocate(layer, init, start)
            if magnitudes:
                norms = torch.linalg.vector_norm(plain_weight(layer.base), dim=1)
                layer.lora_magnitude_vector = nn.Parameter(norms.to(base_dtype(layer.base)))

        self.copy_modules(copies)
        for path in copies:
            self.copied[path].lora_copy = nn.Parameter(self.copied[path].weight.detach().clone())

    def _allocate(self, layer: StackedLora, init: Init | None, start: Start | None) -> None:
        ranks, dtype, device = layer.update.ranks, base_dtype(layer.base), layer.weight.device
        if start is not None:
            pair = start(plain_weight(layer.base), sum(ranks), layer.update.scale)
            low, high = (part.to(dtype).contiguous() for part in pair)
            layer.update = replace(layer.update, start=(low.clone(), high.clone()))
            layer.lora_A, layer.lora_B = nn.Parameter(low), nn.Parameter(high)
            return
        drawn = []
        for rank in ranks:
            low = torch.empty(rank, layer.inputs, dtype=dtype, device="cpu")  # each device draws other numbers
            assert init is not None, "linears have values to draw"
            init(low, layer.outputs)
            drawn.append(low)
        layer.lora_A = nn.Parameter(torch.cat(drawn).to(device))
        layer.lora_B = nn.Parameter(torch.zeros(layer.outputs, sum(ranks), dtype=dtype, device=device))

    def fill(self, states: Mapping[str, AdapterState]) -> None:
        """Initialize the named trainable adapters with these weights, which have the same ranks."""
        for number, name in enumerate(self.trainable):
            for path, (low, high) in states[name].linears.items() if name in states else ():
                layer = self.layers[path]
                assert layer.lora_A is not None and layer.lora_B is not None
                rows = layer.update.rows(number)
                layer.lora_A.data[rows].copy_(low)
                layer.lora_B.data[:, rows].copy_(high if layer.update.factor == 1 else high / layer.update.factor)

    def end_training(self) -> None:
        """Drop the trainable adapters (load their states to keep them)."""
        for layer in self.layers.values():
            layer.lora_A = layer.lora_B = layer.lora_magnitude_vector = None
            layer.update = TrainedUpdate()
        for module in self.copied.values():
            module.lora_copy = None
        self.trainable = {}

    @contextmanager
    def training_aside(self) -> Iterator[None]:
        """Set the adapters in training aside, so that others can be trained, and restore them afterwards."""
        held = [
            (layer, layer.lora_A, layer.lora_B, layer.lora_magnitude_vector, layer.update)
            for layer in self.layers.values()
        ]
        copies = [(module, module.lora_copy) for module in self.copied.values()]
        settings = self.trainable, self.trainable_scale, self.dropout
        self.end_training()
        try:
            yield
        finally:
            for layer, low, high, norms, update in held:
                layer.lora_A, layer.lora_B, layer.lora_magnitude_vector, layer.update = low, high, norms, update
            for module, copy in copies:
                module.lora_copy = copy
            self.trainable, self.trainable_scale, self.dropout = settings

    def trainable_states(self, values: Mapping[str, Tensor]) -> dict[str, AdapterState]:
        """Return the states of the adapters in training.

        Args:
            values: complete parameters by name, as the engine gives them.
        """
        states: dict[str, AdapterState] = {}
        for number, name in enumerate(self.trainable):
            linears, magnitudes = {}, {}
            for path, layer in self.layers.items():
                rows, factor = layer.update.rows(number), layer.update.factor
                low = values[f"model.{path}.lora_A"][rows].clone()
                high = values[f"model.{path}.lora_B"][:, rows] * factor
                if layer.update.start is not None:
                    start_low, start_high = (part.to(low) for part in layer.update.start)
                    low, high = torch.cat([low, start_low]), torch.cat([high, -factor * start_high], dim=1)
                linears[path] = low, high
                if layer.lora_magnitude_vector is not None:
                    magnitudes[path] = values[f"model.{path}.lora_magnitude_vector"].clone()
            trained = [path for path, module in self.copied.items() if module.lora_copy is not None]
            states[name] = AdapterState(
                linears,
                self.trainable_scale,
                activation=self.activation,
                magnitudes=magnitudes,
                copies={path: values[f"model.{path}{COPY}"].clone() for path in trained},
            )
        return states

    # ---- mixtures --------------------------------------------------------------------------------------------

    @contextmanager
    def activate(
        self,
        mixture: Mixture | None,
        examples: Tensor | None = None,
        static: StaticRows | None = None,
        head_rule: HeadRule | None = None,
    ) -> Iterator[None]:
        """Activate a mixture for everything that runs inside, backward and recomputation included.

        Args:
            mixture: None for the bare backbone.
            examples: `[P, S]` example of each position, where examples share rows.
            static: rows at fixed addresses, which nothing else uses meanwhile; None: of any number.
            head_rule: how label heads are mixed; None: as each head was made.

        Raises:
            AdapterError: an adapter that is unknown or does not fit, or weights that are not finite.
        """
        assert not self.is_open, "a mixture is active already: deactivate it first, or its backward reads this one"
        self.is_open, self.heads = True, () if mixture is None else mixture.heads
        self.static, self.head_rule = static, head_rule
        try:
            self._open_mixture(mixture)
            if self.plan is not None and examples is not None:
                self.plan.share_rows(examples)
            yield
        finally:
            self.plan, self.is_open, self.heads = None, False, ()
            self.static = self.head_rule = None
            if static is not None:
                static.clear()

    @contextmanager
    def mixture_aside(self) -> Iterator[None]:
        """Set the active mixture aside: inside, the bare backbone computes, or a mixture that is activated there."""
        held = self.plan, self.static, self.head_rule, self.is_open, self.heads
        self.plan, self.static, self.head_rule, self.is_open, self.heads = None, None, None, False, ()
        try:
            yield
        finally:
            self.plan, self.static, self.head_rule, self.is_open, self.heads = held

    def _open_mixture(self, mixture: Mixture | None) -> None:
        if mixture is None or not mixture.names:
            return
        weights = mixture.weights.to(self.device)
        if not bool(torch.isfinite(weights).all()):
            raise AdapterError(f"the mixture of {', '.join(mixture.names)} has weights that are not finite")
        active = torch.ones(len(mixture.names), dtype=torch.bool) if weights.requires_grad else (weights != 0).any(0)
        used = [name for name, yes in zip(mixture.names, active.tolist(), strict=True) if yes]
        plan = MixturePlan(Mixture(mixture.names, weights), frozenset(used), self.pool)
        column = {name: number for number, name in enumerate(mixture.names)}
        trainable = [(column.get(name, -1), rank, self.trainable_scale) for name, rank in self.trainable.items()]
        if any(name in self.trainable for name in used):
            plan.trainable_gate = gate_of(torch.cat([weights, weights.new_zeros(len(weights), 1)], dim=1), trainable)
        self._plan_loaded(plan, column, [name for name in used if name not in self.trainable])
        alone = [name for name in used if self._is_alone(name)]
        check_alone(plan.mixture, alone)
        plan.alone = {name: weights[:, column[name], None] for name in alone}
        plan.everywhere = frozenset(name for name in alone if bool((plan.alone[name] == 1).all()))
        if self.static is not None:
            self._fill_static(self.static, plan)
        self.plan = plan

    def _is_alone(self, name: str) -> bool:
        if name in self.trainable:
            parts = [layer.lora_magnitude_vector for layer in self.layers.values()]
            return any(part is not None for part in [*parts, *(module.lora_copy for module in self.copied.values())])
        return self.states[name].is_alone

    def _fill_static(self, static: StaticRows, plan: MixturePlan) -> None:
        """Write what adapters that are alone have in addition to rows."""
        for name, weight_B1 in plan.alone.items():
            if name in static.alone:
                static.alone[name][: len(weight_B1)].copy_(weight_B1)
            for path, ratio_BO in static.ratios.items():
                if (ratio_O := self.magnitude_ratio(name, path)) is not None:
                    ratio_BO[: len(weight_B1)] += (weight_B1.to(ratio_O) * (ratio_O - 1)).to(ratio_BO)

    def _plan_loaded(self, plan: MixturePlan, column: Mapping[str, int], names: Sequence[str]) -> None:
        self.need(names)
        plan.pool = self.pool  # loading may have replaced a pool that grows
        # Sums of floats depend on the order of adapters. Without a limit it is that of loading, which a run that was
        # resumed has too, whichever adapters were used first; with one, that of the rows.
        wanted = {name for name in names if self.states[name].rank}
        loaded = list(self.states) if self.grows else sorted(wanted, key=lambda name: self.table.rows[name][0])
        names = [name for name in loaded if name in wanted]
        if not names:
            return
        rows = {column[name]: self.table.rows[name] for name in names}
        owners = [(column[name], len(self.table.rows[name]), self.states[name].scale) for name in names]
        flat = torch.tensor([row for adapter_rows in rows.values() for row in adapter_rows])
        order = torch.arange(len(flat)) if self.grows else flat.argsort()
        weights = plan.mixture.weights
        plan.gate = gate_of(weights, owners)[:, order.to(weights.device)]
        if self.static is not None:
            self.static.fill(self.pool, flat[order], plan.gate)
            return
        plan.index = neighbours(flat[order])
        if not weights.requires_grad:
            plan.own = own_form(weights, owners, rows)

    def detach(self) -> None:
        """Put the model's own linears back."""
        while self._hooks:
            self._hooks.pop().remove()
        for path, replaced in (*self.layers.items(), *self.copied.items(), *self.experts.items()):
            self.model.set_submodule(path, replaced.get_submodule("base"))
        self.experts = {}


def _columns(ranks: Sequence[int], own: Sequence[int], device: torch.device) -> Tensor:
    """Return the column of a gate for adapters of `ranks`, for each row of adapters of ranks `own`."""
    firsts = [sum(ranks[:number]) for number in range(len(ranks))]
    return torch.tensor([first for first, rank in zip(firsts, own, strict=True) for _ in range(rank)], device=device)


def _shape(layer: StackedLora) -> tuple[int, int, torch.dtype, torch.device]:
    return layer.inputs, layer.outputs, base_dtype(layer.base), layer.weight.device
