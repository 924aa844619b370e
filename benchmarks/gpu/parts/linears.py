"""The mixture layer at the linears of one LLaMA layer: over the bare ones, beside a naive sum and PEFT's mixed batch.

Prefill is 4,096 tokens in 8 rows; decoding is one token in 1, 8 and 32 rows, captured as a CUDA graph, as in serving.
The weights of one or two linears fit into the cache of a large GPU, so decoding here is faster than within a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.figures import Figure
from benchmarks.gpu.adapters import dense, drawn_adapters, one_each
from benchmarks.gpu.models import sizes_of
from benchmarks.gpu.setup import DENSE, RANK, Case, Setup, check_close, ratio
from raycl.adapters import AdapterStack
from raycl.adapters.rows import StaticRows
from raycl.types import AdapterState, Mixture

GROUPS = {
    "o": ("attention.out",),
    "q and v": ("attention.query", "attention.value"),
    "all linears": ("attention", "ffn"),
}
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}
"""Tolerances of one layer, where rounding has not accumulated."""
COUNTS, TINY_COUNTS = (1, 4, DENSE, 64), (1, 4)
PHASES = {"prefill": (8, 512), "decode 1": (1, 1), "decode 8": (8, 1), "decode 32": (32, 1)}
TINY_PHASES = {"prefill": (2, 8), "decode 8": (8, 1)}
"""Rows and tokens of a batch."""


class Layer(nn.Module):
    """The linears of one LLaMA layer, each given an input of its own width."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.self_attn.add_module(name, nn.Linear(width, width, bias=False))
        self.mlp = nn.Module()
        for name, shape in {
            "gate_proj": (width, inner),
            "up_proj": (width, inner),
            "down_proj": (inner, width),
        }.items():
            self.mlp.add_module(name, nn.Linear(*shape, bias=False))

    def forward(self, inputs: dict[int, Tensor], paths: tuple[str, ...]) -> list[Tensor]:
        """Return the outputs of the linears at `paths`; `inputs` are by width."""
        layers: list[Any] = [self.get_submodule(path) for path in paths]
        return [layer(inputs[getattr(layer, "in_features", None) or layer.inputs]) for layer in layers]


def cases(setup: Setup) -> Iterator[Case]:
    """Yield cases of the 7B model with all counts, of the 13B model with the targets' mixtures, then PEFT."""
    for group in GROUPS:
        counts = TINY_COUNTS if setup.tiny else COUNTS
        yield Case(f"7B, {group}", partial(_compared, setup, "7B", group, counts))
    yield Case("7B, PEFT", partial(_beside_peft, setup), ("peft",))
    for group in GROUPS:
        yield Case(f"13B, {group}", partial(_compared, setup, "13B", group, (DENSE,)))


@dataclass
class _Bench:
    """One group of linears with so many adapters."""

    layer: Layer
    stack: AdapterStack
    paths: tuple[str, ...]
    adapters: dict[str, AdapterState]
    placed: dict[str, dict[str, tuple[Tensor, Tensor]]]

    @staticmethod
    def of(setup: Setup, size: str, group: str, count: int) -> _Bench:
        """Weights are drawn on the device."""
        sizes = sizes_of(setup, size)
        torch.manual_seed(0)
        with setup.device:
            layer = Layer(sizes.width, sizes.inner).to(setup.dtype).requires_grad_(False)
        adapters = drawn_adapters(layer, GROUPS[group], count, RANK)
        paths = tuple(next(iter(adapters.values())).linears)
        stack = AdapterStack(layer, list(paths), rows=count * RANK)
        for name, state in adapters.items():
            stack.load(name, state)
        placed = {
            name: {path: (a.to(setup.device, setup.dtype), b.to(setup.device, setup.dtype)) for path, (a, b) in pairs}
            for name, pairs in ((name, state.linears.items()) for name, state in adapters.items())
        }
        return _Bench(layer, stack, paths, adapters, placed)

    def inputs(self, setup: Setup, rows: int, tokens: int) -> dict[int, Tensor]:
        """Return the inputs by width."""
        torch.manual_seed(1)
        widths = sorted({layer.inputs for layer in self.stack.layers.values()})
        return {width: setup.randn(rows, tokens, width) for width in widths}

    def bare(self, inputs: dict[int, Tensor]) -> list[Tensor]:
        """Run the linears without adapters."""
        return [layer.base(inputs[layer.inputs]) for layer in self.stack.layers.values()]

    def naive(self, inputs: dict[int, Tensor], mixture: Mixture) -> list[Tensor]:
        """Run one adapter after another, as the formula is written."""
        bare = self.bare(inputs)
        weights_BN = mixture.weights.to(bare[0].device, bare[0].dtype)
        for column, name in enumerate(mixture.names):
            gate_B11 = weights_BN[:, column, None, None]
            for index, (path, layer) in enumerate(self.stack.layers.items()):
                a_RD, b_OR = self.placed[name][path]
                bare[index] = bare[index] + gate_B11 * linear(linear(inputs[layer.inputs], a_RD), b_OR)
        return bare

    def exact(self, inputs: dict[int, Tensor], mixture: Mixture) -> list[Tensor]:
        """Return the same in float32."""
        collected = []
        for path, layer in self.stack.layers.items():
            x = inputs[layer.inputs].float()
            y = linear(x, layer.weight.float())
            for column, name in enumerate(mixture.names):
                a_RD, b_OR = (part.float() for part in self.placed[name][path])
                y += mixture.weights[:, column].to(x)[:, None, None] * linear(linear(x, a_RD), b_OR)
            collected.append(y)
        return collected


def _compared(setup: Setup, size: str, group: str, counts: tuple[int, ...], seconds: float) -> Iterator[Figure]:
    phases = TINY_PHASES if setup.tiny else PHASES
    share = seconds / (len(counts) * len(phases))
    for count in counts:
        bench = _Bench.of(setup, size, group, count)
        for phase, (rows, tokens) in phases.items():
            mixture = dense(tuple(bench.adapters), rows).on(setup.device)
            inputs = bench.inputs(setup, rows, tokens)
            yield _over_bare(setup, bench, mixture, inputs, f"{size}, {group}, {phase}, adapters {count}", share)


def _over_bare(
    setup: Setup, bench: _Bench, mixture: Mixture, inputs: dict[int, Tensor], name: str, seconds: float
) -> Figure:
    results: dict[str, list[Tensor]] = {}
    runs: dict[str, Callable[[], Any]] = {
        "bare": lambda: bench.bare(inputs),
        "mixed": lambda: bench.layer(inputs, bench.paths),
        "naive": lambda: bench.naive(inputs, mixture),
    }
    rows, tokens = next(iter(inputs.values())).shape[:2]
    # at fixed addresses, so that a graph can be captured
    room = StaticRows(bench.stack.pool, len(mixture.names) * RANK, rows) if tokens == 1 else None
    with torch.no_grad(), bench.stack.activate(mixture, static=room):

        def keep(what: str) -> None:
            results[what] = runs[what]()

        timed: dict[str, Callable[[], Any]] = {what: partial(keep, what) for what in runs}
        for run in timed.values():
            run()
        timed = {what: setup.replayed(run) if tokens == 1 else run for what, run in timed.items()}
        times = setup.turns(timed, seconds)
        for path, mine, expected in zip(bench.paths, results["mixed"], bench.exact(inputs, mixture), strict=True):
            check_close(f"{name}, {path}", mine, expected, CLOSE[mine.dtype])
    detail = f"a naive sum takes {times['naive'].median / times['bare'].median:.2f} times the bare linears' time"
    return ratio(f"{name}: dense over bare", times["mixed"], times["bare"], detail=detail)


def _beside_peft(setup: Setup, seconds: float) -> Iterator[Figure]:
    """PEFT's mixed batch has one adapter a row and cannot be captured, so both run eagerly."""
    from peft import LoraConfig, get_peft_model

    for phase, (rows, tokens) in (("prefill", (16, 256)), ("decode", (32, 1))):
        bench = _Bench.of(setup, "7B", "q and v", DENSE)
        inputs, mixture = bench.inputs(setup, rows, tokens), one_each(tuple(bench.adapters), rows).on(setup.device)
        plain = Layer.__new__(Layer)
        nn.Module.__init__(plain)
        plain.self_attn, plain.mlp = nn.Module(), nn.Module()
        for path, layer in bench.stack.layers.items():
            parent, _, name = path.rpartition(".")
            plain.get_submodule(parent).add_module(name, layer.base)
        lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(bench.paths))
        theirs: Any = get_peft_model(plain, lora, adapter_name="a0")
        for name in list(bench.adapters)[1:]:
            theirs.add_adapter(name, lora)
        _fill(theirs, bench)
        theirs.eval()
        names = [mixture.names[row % len(mixture.names)] for row in range(rows)]
        with torch.no_grad(), bench.stack.activate(mixture):
            runs = {
                "bare": partial(bench.bare, inputs),
                "mixed": partial(bench.layer, inputs, bench.paths),
                "peft": partial(theirs, inputs, bench.paths, adapter_names=names),
            }
            times = setup.turns(runs, seconds / 2)
            for path, mine, peft, expected in zip(
                bench.paths, runs["mixed"](), runs["peft"](), bench.exact(inputs, mixture), strict=True
            ):
                check_close(f"one adapter a row, {phase}, {path}", mine, expected, CLOSE[mine.dtype])
                check_close(f"PEFT, one adapter a row, {phase}, {path}", peft, expected, CLOSE[mine.dtype])
        what = f"7B, q and v, {phase} {rows} x {tokens}: {DENSE} adapters, one a row"
        yield ratio(f"{what}, over bare", times["mixed"], times["bare"], detail="eager")
        yield ratio(f"{what}, PEFT's mixed batch over ours", times["peft"], times["mixed"], detail="eager")


def _fill(theirs: Any, bench: _Bench) -> None:
    """Fill with the same weights."""
    for path in bench.paths:
        layer = theirs.get_submodule(f"base_model.model.{path}")
        for name in bench.adapters:
            a_RD, b_OR = bench.placed[name][path]
            layer.lora_A[name].weight.data = a_RD
            layer.lora_B[name].weight.data = b_OR
