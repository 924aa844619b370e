"""Decoding on a GPU: static cache and CUDA graphs, a 7B-shaped LLaMA of random weights, with and without adapters.

The bare backbone is captured first, then the same model with its stack; the two graphs are replayed in turn.
What it does not know: texts, adapters that mean something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from raycl.adapters import AdapterStack
from raycl.backbone.roles import linear_names
from raycl.backbone.slots import captured
from raycl.bench.figures import Figure
from raycl.types import AdapterState, Mixture

LIMIT = 1.10
TARGETS = {"q, v": ("attention.query", "attention.value"), "all linears": ("attention", "ffn")}


@dataclass(frozen=True)
class Shape:
    """Sizes of model and decoding; the defaults are LLaMA-7B's, in bfloat16."""

    layers: int = 32
    width: int = 4096
    inner: int = 11008
    heads: int = 32
    vocabulary: int = 32_000
    batch: int = 32
    tokens: int = 128
    adapters: int = 16
    rank: int = 8
    rounds: int = 5
    dtype: torch.dtype = torch.bfloat16


def decode_figures(shape: Shape, device: torch.device) -> Iterator[Figure]:
    """Time per decoding step with `adapters` dense adapters over the bare backbone's."""
    for where, targets in TARGETS.items():
        model = _model(shape, device)
        bare = _Decoder(model, shape, device)
        paths = linear_names(model, targets)
        stack = AdapterStack(model, paths, rows=shape.adapters * shape.rank)
        stack.preallocate(shape.adapters * shape.rank, shape.batch)
        for number in range(shape.adapters):
            stack.load(f"n{number}", _state(stack, shape.rank))
        weights = torch.softmax(torch.randn(shape.batch, shape.adapters), 1)
        mixture = Mixture(tuple(stack.states), weights)
        mixed = _Decoder(model, shape, device, partial(stack.mixing, mixture))
        times: dict[str, list[float]] = {"bare": [], "mixed": []}
        for _ in range(shape.rounds):
            for name, decoder in (("bare", bare), ("mixed", mixed)):
                times[name].append(decoder.seconds_per_step())
        mine, theirs = median(times["mixed"]), median(times["bare"])
        rates = f"{shape.batch / mine:,.0f} against {shape.batch / theirs:,.0f} tokens/s"
        name = f"decode, {where}: {shape.adapters} adapters, dense, over the bare backbone"
        yield Figure(name, mine / theirs, "x", LIMIT, "<=", rates)
        del model, bare, mixed, stack
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _Decoder:
    """One model's decoding step, captured as a graph where there is a GPU."""

    def __init__(
        self,
        model: Any,
        shape: Shape,
        device: torch.device,
        speaking: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model, self.shape, self.device, self.speaking = model, shape, device, speaking
        self.cache = StaticCache(config=model.config, max_cache_len=shape.tokens + 8)
        self.ids = torch.zeros(shape.batch, 1, dtype=torch.long, device=device)
        with torch.no_grad(), speaking():
            self._step()
            self.graph = captured(self._step) if device.type == "cuda" else None

    def _step(self) -> None:
        logits = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True).logits
        self.ids.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def seconds_per_step(self) -> float:
        """Over as many steps as the cache has room for."""
        self.cache.reset()
        with torch.no_grad(), self.speaking():
            run = self.graph.replay if self.graph is not None else self._step
            self._wait()
            began = time.perf_counter()
            for _ in range(self.shape.tokens):
                run()
            self._wait()
            return (time.perf_counter() - began) / self.shape.tokens

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _model(shape: Shape, device: torch.device) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=2048,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _state(stack: AdapterStack, rank: int) -> AdapterState:
    def small(*size: int) -> torch.Tensor:
        return torch.randn(*size) * 0.02

    layers = stack.layers.items()
    return AdapterState({path: (small(rank, layer.inputs), small(layer.outputs, rank)) for path, layer in layers})
