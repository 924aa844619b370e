"""Sequences that are decoded at fixed addresses: one step is one CUDA graph for any mixture.

On a GPU a step of a small batch is a thousand small kernels, whose launches take longer than they do. Here nothing
changes its shape or address while sequences come and go: each has a slot in caches that are made once (and again, twice
as long, when one of them outgrows them), so that a step can be captured and replayed. A slot's columns are filled from
the first on, so a column is a position too. Empty slots are computed; their outputs are discarded. Without a GPU the
same steps run uncaptured. For decoder-only backbones; others use `dynamic_cache`. Adapters are the caller's: it
activates them at fixed addresses and gives a key for the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from raycl.backbone.base import Backbone
from raycl.backbone.positions import attends_to_all
from raycl.generation.dynamic_cache import DynamicKVCache, kept_in

log: logging.Logger = logging.getLogger("raycl")

COLUMNS = 256
"""The number of columns of the first caches."""

WARM_STEPS = 3
"""The number of steps before a capture, which torch requires."""

MASKED = ("sdpa", "eager")
"""Attentions that take a mask of any shape."""

MODELS = ("gpt2", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3")
"""Model types that need positions and mask only; others may depend on the number of columns (ALiBi)."""


def supports_static_cache(backbone: Backbone) -> bool:
    """Return whether its sequences can be decoded with static caches: every layer attends to all earlier positions."""
    config = backbone.model.config
    if not backbone.capabilities.one_sequence or config.model_type not in MODELS:
        return False
    return attends_to_all(config) and config._attn_implementation in MASKED


class StaticCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values `[B, heads, T, width]` of one layer; a row's next ones go to its own column.

    Attributes:
        positions: `[B]` these columns, shared by all layers.
    """

    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.positions = positions
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, since the tensors exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B, heads, 1, width]` of both, and return all keys and values."""
        for held, fresh in ((self.keys, key_states), (self.values, value_states)):
            index = self.positions.view(-1, 1, 1, 1).expand(fresh.shape)
            held.scatter_(2, index, fresh.to(held.dtype))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return all columns, from the first on."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Return 0; the length is read only where neither mask nor positions are given."""
        return 0

    def get_max_length(self) -> int:
        """Return T."""
        return int(self.keys.shape[2])


@cache
def _side_stream() -> Any:
    """Return the stream of all captures, since each stream keeps memory of its own."""
    make: Any = torch.cuda.Stream
    return make()


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a step on the GPU as a graph; it is warmed by running it before, and not run by being captured.

    Raises:
        RuntimeError: it does what cannot be captured, or there is no GPU.
    """
    side = _side_stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(WARM_STEPS):
                step()
    finally:  # a failed capture has used memory that the next uncaptured step uses
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    mode = "thread_local"  # other threads may use the device during the capture
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode=mode):
        step()
    return graph


class StaticKVCache:
    """Slots for `rows` sequences, ordered as the sequences joined.

    Attributes:
        rows: B.
        order: slot of each sequence.
        captures: graphs captured so far.
    """

    def __init__(self, backbone: Backbone, rows: int, columns: int = COLUMNS, graphs: bool = True) -> None:
        """Allocate nothing yet.

        Args:
            columns: columns of the first caches. graphs: capture steps where there is a GPU.
        """
        self.backbone = backbone
        self.rows = rows
        self.columns: int = columns
        self.order: list[int] = []
        self._order_index = self._indexed([])
        self.captures: int = 0
        self._lengths = [0] * rows
        device = backbone.device
        self._ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros(rows, dtype=torch.long, device=device)
        self._moves = torch.zeros(rows, dtype=torch.long, device=device)
        self._mask = self._closed(columns)
        self._layers: list[StaticCacheLayer] = []
        self._logits: Tensor | None = None
        self._captures = graphs and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tried: Hashable = None

    def __len__(self) -> int:
        return len(self.order)

    @property
    def logits(self) -> Tensor:
        """Logits `[n, V]` of each sequence's next token."""
        assert self._logits is not None, "there are no sequences"
        return self._logits[self._order_index]

    def joined(self, other: DynamicKVCache) -> StaticKVCache:
        """Add sequences; there must be slots for them."""
        free = [slot for slot in range(self.rows) if slot not in set(self.order)][: len(other)]
        assert len(free) == len(other), "more sequences than slots"
        lengths = other.mask.sum(1).tolist()
        self._reserve(other, other.mask.shape[1])
        assert self._logits is not None
        index, length_N = self._indexed(free), self._indexed(lengths)
        self._logits[index] = other.logits
        self._positions[index] = length_N
        self._moves[index] = 1
        open_NT = torch.arange(self.columns, device=length_N.device) < length_N[:, None]
        self._mask[index] = self._closed(self.columns)[:1].masked_fill(open_NT[:, None, None], 0.0)
        wide = other.mask.shape[1]  # rows are moved from the right to the left
        source_NW = (torch.arange(wide, device=length_N.device) - length_N[:, None]) % wide
        for layer, (keys, values) in zip(self._layers, other.layers, strict=True):
            for held, fresh in ((layer.keys, keys), (layer.values, values)):
                held[index] = 0.0  # old values may not be finite, and 0 times them is not 0
                held[index, :, :wide] = fresh.gather(2, source_NW[:, None, :, None].expand(fresh.shape))
        for slot, length in zip(free, lengths, strict=True):
            self._lengths[slot] = length
        self._set_order([*self.order, *free])
        return self

    def kept(self, rows: Sequence[int]) -> StaticKVCache:
        """Keep only these sequences, and free the slots of the others."""
        slots = [self.order[row] for row in rows]
        gone = self._indexed([slot for slot in self.order if slot not in set(slots)])
        self._positions[gone] = 0
        self._moves[gone] = 0
        self._mask[gone] = torch.finfo(self._mask.dtype).min
        self._mask[gone, :, :, 0] = 0.0  # attention to no position is not a number
        self._set_order(slots)
        return self

    def placed(self, rows_BN: Tensor) -> Tensor:
        """Return a row for each slot, 0 for empty ones, from a row for each sequence."""
        placed = rows_BN.new_zeros(self.rows, rows_BN.shape[1])
        placed[self.order] = rows_BN
        return placed

    @torch.no_grad()
    def step(self, next_B: Tensor, graph_key: Hashable = None) -> StaticKVCache:
        """Advance every sequence by one token; the mixture of all slots must be open.

        Args:
            next_B: the token that each was given, int64.
            graph_key: identifies the addresses of the open mixture; a captured step serves no other.
        """
        self._ids[self._order_index, 0] = next_B
        if max(self._lengths[slot] for slot in self.order) >= self.columns:
            self._lengthen(2 * self.columns)
        for slot in self.order:
            self._lengths[slot] += 1
        if self._captures and self._tried != (graph_key, self.columns):
            self._tried, self._graph = (graph_key, self.columns), None  # frees the old graph's memory first
            self._graph = self._captured()
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()
        return self

    def _forward(self) -> None:
        """Run the step; it must not wait for the device or allocate memory that outlives it."""
        assert self._logits is not None
        self._mask.scatter_(3, self._positions.view(-1, 1, 1, 1), 0.0)
        with self.backbone.precision():
            out = self.backbone.model(
                input_ids=self._ids,
                attention_mask=self._mask,
                position_ids=self._positions[:, None],
                **kept_in(Cache(layers=list(self._layers)), self.backbone),
            )
        self._logits.copy_(out.logits[:, -1])
        self._positions.add_(self._moves)

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """Capture a step; None: there is too little memory, or this model cannot be captured."""
        moves = self._moves.clone()
        self._moves.zero_()  # positions do not advance in warm-up steps, so what they write is overwritten
        try:
            graph = captured(self._forward)
        except RuntimeError as error:
            log.warning("decoding continues without CUDA graphs: %s", error)
            self._captures = isinstance(error, torch.OutOfMemoryError)
            return None
        finally:
            self._moves.copy_(moves)
        self.captures += 1
        log.info("decoding captured: %d sequences of %d tokens", self.rows, self.columns)
        return graph

    # ---- room ------------------------------------------------------------------------------------------------

    def _reserve(self, example: DynamicKVCache, columns: int) -> None:
        """Allocate caches like the example's, with at least this many columns."""
        if self._logits is None:
            layers = []
            for keys, values in example.layers:
                room = [
                    cache.new_zeros(self.rows, cache.shape[1], self.columns, cache.shape[3]) for cache in (keys, values)
                ]
                layers.append(StaticCacheLayer(room[0], room[1], self._positions))
            self._layers, self._logits = layers, example.logits.new_zeros(self.rows, example.logits.shape[1])
        while self.columns < columns:
            self._lengthen(2 * self.columns)

    def _lengthen(self, columns: int) -> None:
        """Allocate longer caches; captured graphs become invalid."""
        self._graph, self._tried = None, None
        gap = columns - self.columns
        mask = self._closed(columns)
        mask[..., : self.columns] = self._mask
        longer = [(pad(layer.keys, (0, 0, 0, gap)), pad(layer.values, (0, 0, 0, gap))) for layer in self._layers]
        for layer, (keys, values) in zip(self._layers, longer, strict=True):
            layer.keys, layer.values = keys, values
        self.columns = columns
        self._mask = mask

    def _closed(self, columns: int) -> Tensor:
        """Return `[B, 1, 1, T]` to add to the scores of attention, under which only the first column is attended to."""
        dtype, device = self.backbone.dtype, self.backbone.device
        mask = torch.full((self.rows, 1, 1, columns), torch.finfo(dtype).min, dtype=dtype, device=device)
        mask[..., 0] = 0.0
        return mask

    def _set_order(self, order: list[int]) -> None:
        self.order, self._order_index = order, self._indexed(order)

    def _indexed(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.long, device=self.backbone.device)
