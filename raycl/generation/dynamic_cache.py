"""Sequences that are decoded together although they began at different times: a new one joins at any step.

Libraries that let requests join a running batch pack all tokens into one row, and then no row can have its own mixture
of adapters. Here every sequence keeps a row of its own: caches are padded on the left, so that all rows write their
next key at the same column, and what a row computes is what it would compute alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from raycl.backbone.base import Backbone
from raycl.backbone.causal import pad_left
from raycl.backbone.roles import last_feed_forward
from raycl.data.loader import batch_of
from raycl.errors import BackboneError
from raycl.generation.requests import TokenLogprobs
from raycl.generation.sampling import logprobs_of

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values `[B, heads, T, width]` of each layer."""

PART = 256
"""Positions whose logits are computed together where those of a whole prompt are wanted."""

ADDED = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers end by adding the feed-forward block's output at each position to that position."""


@dataclass(frozen=True)
class DynamicKVCache:
    """The state of B sequences after some of their tokens.

    Attributes:
        logits: `[B, V]` of the next token.
        mask: `[B, T]` int64, 0 on the padding at the left. layers: caches of these T positions.
        source_mask: `[B, S]`, hidden: `[B, S, D]`, cross: caches of the S source positions, padded on the right; only
            with an encoder.
    """

    logits: Tensor
    mask: Tensor
    layers: Layers
    source_mask: Tensor | None = None
    hidden: Tensor | None = None
    cross: Layers | None = None

    def __len__(self) -> int:
        return len(self.mask)

    def joined(self, other: DynamicKVCache) -> DynamicKVCache:
        """Return both together, the rows of this cache first."""
        columns = max(self.mask.shape[1], other.mask.shape[1])
        mine, its = self._widened(columns), other._widened(columns)
        logits, mask = torch.cat([mine.logits, its.logits]), torch.cat([mine.mask, its.mask])
        both = DynamicKVCache(logits, mask, _cat_all(mine.layers, its.layers))
        if mine.source_mask is None or its.source_mask is None:
            return both
        assert mine.hidden is not None and its.hidden is not None and mine.cross is not None and its.cross is not None
        wide = max(mine.source_mask.shape[1], its.source_mask.shape[1])
        masks = [pad(mask, (0, wide - mask.shape[1])) for mask in (mine.source_mask, its.source_mask)]
        hidden = [pad(states, (0, 0, 0, wide - states.shape[1])) for states in (mine.hidden, its.hidden)]
        cross = _cat_all(_right(mine.cross, wide), _right(its.cross, wide))
        return replace(both, source_mask=torch.cat(masks), hidden=torch.cat(hidden), cross=cross)

    def _widened(self, columns: int) -> DynamicKVCache:
        gap = columns - self.mask.shape[1]
        if not gap:
            return self
        layers = [(pad(keys, (0, 0, gap, 0)), pad(values, (0, 0, gap, 0))) for keys, values in self.layers]
        return replace(self, mask=pad(self.mask, (gap, 0)), layers=layers)

    def kept(self, rows: Sequence[int]) -> DynamicKVCache:
        """Return only these rows, without columns that are padding for all of them."""
        index = torch.tensor(list(rows), device=self.mask.device, dtype=torch.long)
        mask = self.mask[index]
        first = int(mask.any(0).int().argmax()) if len(rows) else 0
        layers = [(keys[index][:, :, first:], values[index][:, :, first:]) for keys, values in self.layers]
        fresh = replace(self, logits=self.logits[index], mask=mask[:, first:], layers=layers)
        if self.source_mask is None or self.hidden is None or self.cross is None:
            return fresh
        sources = self.source_mask[index]
        last = int(sources.any(0).nonzero().max()) + 1 if len(rows) else 0  # a masked prefix comes first
        cross = [(keys[index][:, :, :last], values[index][:, :, :last]) for keys, values in self.cross]
        return replace(fresh, source_mask=sources[:, :last], hidden=self.hidden[index][:, :last], cross=cross)


@torch.no_grad()
def begin(backbone: Backbone, sources: Sequence[Sequence[int]]) -> DynamicKVCache:
    """Read prompts; their mixture must be open.

    Args:
        sources: ids of each prompt with its special tokens.
    """
    prompts = batch_of(sources, backbone.codec.pad_id).to(backbone.device)
    with backbone.precision():
        inputs, _ = backbone.prefixed(prompts.source_ids, prompts.source_mask)
        return _encoded(backbone, inputs) if backbone.capabilities.separate_encoder else _read(backbone, inputs)


def _read(backbone: Backbone, inputs: dict[str, Tensor]) -> DynamicKVCache:
    """Read the prompts of a decoder-only model, where they begin the sequence."""
    rows, mask = pad_left(*inputs.values())
    name = next(iter(inputs))
    positions, cache = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache()
    with _ends_alone(backbone.model):
        out = backbone.model(
            **{name: rows},
            attention_mask=mask,
            position_ids=positions,
            **kept_in(cache, backbone),
            logits_to_keep=1,
        )
    return DynamicKVCache(out.logits[:, -1], mask, _layers(cache))


@torch.no_grad()
def prompt_logprobs(backbone: Backbone, ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return log probabilities of the tokens of a decoder-only model's prompt, from the second one on; its mixture must
    be open.

    The prompt is read in parts, whose logits at all positions fit into memory.

    Args:
        count: most likely tokens that are returned with each.
    """
    prompt = batch_of([ids], backbone.codec.pad_id).to(backbone.device)
    cache, found = DynamicCache(), []
    with backbone.precision():
        inputs, before = backbone.prefixed(prompt.source_ids, prompt.source_mask)
        mask = inputs.pop("attention_mask")
        (name,) = inputs
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for start in range(0, before + len(ids) - 1, PART):
            end = min(start + PART, before + len(ids) - 1)
            out = backbone.model(
                **{name: inputs[name][:, start:end]},
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                **kept_in(cache, backbone),
            )
            first = max(start, before)  # a position in front of the text predicts no token of it
            if first < end:
                following = ids[first - before + 1 : end - before + 1]
                found += logprobs_of(out.logits[0, first - start :], following, count)
    return found


@torch.no_grad()
def read_on(backbone: Backbone, layers: Layers, before: Tensor, rests: Sequence[Sequence[int]]) -> DynamicKVCache:
    """Continue the sequences of a decoder-only model by at least one token each; the mixture of all must be open.

    Args:
        layers, before: caches and mask `[B, P]` of the tokens so far. rests: ids that follow in each row.
    """
    prompts = batch_of(rests, backbone.codec.pad_id).to(backbone.device)
    ids, mask = pad_left(prompts.source_ids, prompts.source_mask)
    full_mask, cache = torch.cat([before, mask], dim=1), _cache(layers)
    with backbone.precision(), _ends_alone(backbone.model):
        out = backbone.model(
            input_ids=ids,
            attention_mask=full_mask,
            position_ids=(full_mask.cumsum(1) - 1).clamp(min=0)[:, before.shape[1] :],
            **kept_in(cache, backbone),
            logits_to_keep=1,
        )
    return DynamicKVCache(out.logits[:, -1], full_mask, _layers(cache))


@contextmanager
def _ends_alone(model: Any) -> Iterator[None]:
    """Run the last layer's feed-forward block only at the last position of each row.

    Nothing reads its output elsewhere: the layer's keys and values are computed before it, and logits at the last
        position. Its output is added to all positions of the residual stream, and is right at the last.
    """
    block = last_feed_forward(model) if model.config.model_type in ADDED else None
    if block is None:
        yield
        return
    with block.register_forward_pre_hook(_last_position):
        yield


def _last_position(block: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given[0][:, -1:], *given[1:])


def _encoded(backbone: Backbone, inputs: dict[str, Tensor]) -> DynamicKVCache:
    """Read prompts by the encoder of an encoder-decoder model; sequences begin with the start token."""
    model = backbone.model
    hidden = model.get_encoder()(**inputs).last_hidden_state
    start = model.generation_config.decoder_start_token_id
    start = model.config.decoder_start_token_id if start is None else start
    ids = torch.full((len(hidden), 1), int(start), device=hidden.device)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    out = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
        attention_mask=inputs["attention_mask"],
        decoder_input_ids=ids,
        **kept_in(cache, backbone),
    )
    layers, cross = _layers(cache.self_attention_cache), _layers(cache.cross_attention_cache)
    return DynamicKVCache(out.logits[:, -1], torch.ones_like(ids), layers, inputs["attention_mask"], hidden, cross)


@torch.no_grad()
def step(backbone: Backbone, state: DynamicKVCache, next_B: Tensor) -> DynamicKVCache:
    """Advance every sequence by one token; the mixture of all rows must be open.

    Args:
        next_B: the token that each was given, int64.
    """
    mask = pad(state.mask, (0, 1), value=1)
    with backbone.precision():
        if state.cross is None:
            cache = _cache(state.layers)
            out = backbone.model(
                input_ids=next_B[:, None],
                attention_mask=mask,
                position_ids=state.mask.sum(1, keepdim=True),
                **kept_in(cache, backbone),
            )
            return DynamicKVCache(out.logits[:, -1], mask, _layers(cache))
        both = EncoderDecoderCache(_cache(state.layers), _cache(state.cross))
        out = backbone.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=state.hidden),
            attention_mask=state.source_mask,
            decoder_input_ids=next_B[:, None],
            decoder_attention_mask=mask,
            **kept_in(both, backbone),
        )
    layers = _layers(both.self_attention_cache)
    return replace(state, logits=out.logits[:, -1], mask=mask, layers=layers)


def kept_in(cache: Any, backbone: Backbone) -> dict[str, Any]:
    """Return the arguments of a model's forward pass by which it continues a cache and adds to it."""
    return {backbone.cache_argument or "cache": cache, "use_cache": True}


def _cache(layers: Layers) -> DynamicCache:
    """Return a cache of keys and values without copies; `DynamicCache.update` would copy them twice."""
    cache = DynamicCache()
    for keys, values in layers:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _layers(cache: DynamicCache) -> Layers:
    """Return the keys and values that a model has added to a cache."""
    plain = [layer for layer in cache.layers if type(layer).__name__ == "DynamicLayer"]
    if not plain or len(plain) != len(cache.layers):
        raise BackboneError(
            "this backbone keeps something else than keys and values between tokens (a sliding window, a recurrent "
            "state, nothing), so sequences cannot join a running batch: serve another one"
        )
    return [(layer.keys, layer.values) for layer in plain]


def _cat_all(mine: Layers, its: Layers) -> Layers:
    pairs = zip(mine, its, strict=True)
    return [(torch.cat([keys, more_keys]), torch.cat([values, more])) for (keys, values), (more_keys, more) in pairs]


def _right(layers: Layers, columns: int) -> Layers:
    gap = columns - layers[0][0].shape[2]
    return [(pad(keys, (0, 0, 0, gap)), pad(values, (0, 0, 0, gap))) for keys, values in layers]
