"""The mixture layer against the bare backbone, PEFT's mixed batch, and merging per request: same weights, same inputs.

All contenders are measured in turn within one process, round after round, and each of them between two passes of the
bare backbone, so that a machine that slows down slows both; medians over the rounds are compared. It runs on a CPU;
`benchmark gpu` measures prefill and decoding of large models on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from benchmarks.figures import Figure, Report, measured
from benchmarks.model_copies import shared_copy
from raycl.adapters import AdapterStack
from raycl.adapters.state import combine, fold
from raycl.backbone import BackboneConfig, load_backbone, load_codec
from raycl.backbone.roles import linear_names
from raycl.types import AdapterState, Mixture

TARGETS = {"q, v": ("attention.query", "attention.value"), "all linears": ("attention", "ffn")}
LIMITS = {"q, v": 1.3, "all linears": 1.6}
"""Time of 16 dense adapters over the bare backbone's."""

DENSE, GAIN, FLAT = 16, 5.0, 1.1
SETTINGS = ("batch_size", "tokens", "rank", "rounds", "threads", "adapters", "bank")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--backbone", default="minilm", help="an encoder: its hidden states are what is timed")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="length of every row")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16, 64], help="adapters in the mixtures")
    parser.add_argument("--bank", type=int, default=10_000, help="adapters that a bank holds, 16 of them in use")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    figures = (figure for where in TARGETS for figure in _figures(where, options))
    return measured("mixing", options, SETTINGS, lambda: figures, threads=options.threads)


def _figures(where: str, options: argparse.Namespace) -> Iterator[Figure]:
    bench = _Bench(where, options)
    timed = bench.times()
    for count in options.adapters:
        for shape in ("dense", "one each"):
            result = timed[f"{count} {shape}"]
            limit = LIMITS[where] if (count, shape) == (DENSE, "dense") else None
            name = f"{where}: {count} adapters, {shape}, over the bare backbone"
            yield Figure(name, result.ratio, "x", limit, "<=", f"{result.added_ms:.1f} ms on {result.bare_ms:.1f} ms")
        theirs = timed[f"peft {count}"]
        yield Figure(f"{where}: PEFT mixed batch of {count} over the bare backbone", theirs.ratio, "x")
        for shape, rows in (("one each", "the same mixtures"), ("dense", f"{count} adapters a row here, 1 there")):
            mine = timed[f"{count} {shape}"]
            limit = GAIN if (count, shape) == (DENSE, "one each") else None
            name = f"{where}: PEFT's added time over ours, {count} adapters, {shape}"
            detail = f"{theirs.added_ms:.1f} ms by PEFT, {mine.added_ms:.1f} ms here; {rows}"
            yield Figure(name, theirs.added_ms / max(mine.added_ms, 0.1), "x", limit, ">=", detail)
    yield Figure(f"{where}: merging for each of {options.batch_size} requests", timed["merge"].ratio, "x")
    flat, base = timed["bank"], timed[f"{DENSE} dense"]
    name = f"{where}: {DENSE} in use of {options.bank} in the bank, over {DENSE} of {DENSE}"
    detail = f"{flat.added_ms:.1f} ms against {base.added_ms:.1f} ms on {base.bare_ms:.1f} ms"
    yield Figure(name, flat.ratio / base.ratio, "x", FLAT, "<=", detail)
    loading = timed["missing"].added_ms - base.added_ms
    yield Figure(f"{where}: bringing {DENSE} adapters of the bank to the device", loading, "ms")
    yield Figure(f"{where}: largest difference to the merged model", bench.difference(), "", 1e-3)


@dataclass(frozen=True)
class _Timed:
    """A contender beside the bare backbone, which ran right before and after it in every round.

    Attributes:
        ratio: ratio of the times. added_ms: their difference. bare_ms: time of the backbone. All are medians over
            rounds.
    """

    ratio: float
    added_ms: float
    bare_ms: float


class _Bench:
    """One choice of linears: bare, stacked, PEFT and merged twins of one backbone, and one batch."""

    def __init__(self, where: str, options: argparse.Namespace) -> None:
        self.options = options
        config = BackboneConfig(name=options.backbone, dtype="float32")
        codec = load_codec(config, options.tokens, 1)
        self.bare = load_backbone(config, codec, torch.device("cpu"), 0).model.eval()
        self.paths = linear_names(self.bare, TARGETS[where])
        self.most = max([*options.adapters, DENSE])
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1000, 20_000, (options.batch_size, options.tokens), generator=draw)
        shapes = {path: self.bare.get_submodule(path).weight.shape for path in self.paths}

        def state() -> AdapterState:
            def small(*shape: int) -> Tensor:
                return torch.randn(*shape, generator=draw) * 0.02

            size = options.rank
            return AdapterState({path: (small(size, into), small(out, size)) for path, (out, into) in shapes.items()})

        self.states = {f"n{number}": state() for number in range(self.most)}
        self.stacked = copy.deepcopy(self.bare)
        loaded = (self.most + DENSE) * options.rank
        self.stack = AdapterStack(self.stacked, self.paths, rows=loaded, source=self._source)
        self.peft = self._peft()

    def _source(self, name: str) -> AdapterState:
        """Return a bank of any size: adapter number i is one of the states that were drawn."""
        return self.states[f"n{int(name[1:]) % self.most}"]

    def _peft(self) -> Any:
        lora = LoraConfig(r=self.options.rank, lora_alpha=self.options.rank, target_modules=self.paths)
        model = get_peft_model(copy.deepcopy(self.bare), lora, adapter_name="n0")
        for name in list(self.states)[1:]:
            model.add_adapter(name, lora)
        return model.eval()

    def times(self) -> dict[str, _Timed]:
        """Contender -> its time beside the bare backbone's."""
        result: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in self._contenders()}
        with torch.no_grad():
            for number in range(self.options.rounds + 1):
                before = self._bare_s()
                for name, run in self._contenders():
                    began = time.perf_counter()
                    run()
                    spent = time.perf_counter() - began
                    after = self._bare_s()
                    if number:  # the first round warms up
                        result[name].append((spent, (before + after) / 2))
                    before = after
        return {
            name: _Timed(
                median(mine / bare for mine, bare in pairs),
                median(mine - bare for mine, bare in pairs) * 1e3,
                median(bare for _, bare in pairs) * 1e3,
            )
            for name, pairs in result.items()
        }

    def _bare_s(self) -> float:
        began = time.perf_counter()
        self.bare(input_ids=self.ids)
        return time.perf_counter() - began

    def _contenders(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for count in self.options.adapters:
            names = tuple(self.states)[:count]
            yield f"{count} dense", partial(self._mixed, names, self._dense(count))
            yield f"{count} one each", partial(self._mixed, names, self._one_each(count))
            yield f"peft {count}", partial(self._adapter_names, names)
        if DENSE not in self.options.adapters:
            yield f"{DENSE} dense", lambda: self._mixed(tuple(self.states)[:DENSE], self._dense(DENSE))
        # a bank of any size: adapter number i is one of the states that were drawn
        spread = tuple(f"n{number}" for number in range(self.options.bank - DENSE, self.options.bank))
        yield "missing", lambda: self._mixed(spread, self._dense(DENSE), drop=True)
        yield "bank", lambda: self._mixed(spread, self._dense(DENSE))
        yield "merge", self._merge_each

    def _mixed(self, names: tuple[str, ...], weights: Tensor, drop: bool = False) -> Tensor:
        for name in self.stack.states.keys() & set(names) if drop else ():
            self.stack.drop(name)
        with self.stack.activate(Mixture(names, weights)):
            return self.stacked(input_ids=self.ids).last_hidden_state  # type: ignore[no-any-return]

    def _dense(self, count: int) -> Tensor:
        draw = torch.Generator().manual_seed(count)
        return torch.softmax(torch.randn(self.options.batch_size, count, generator=draw), 1)

    def _one_each(self, count: int) -> Tensor:
        return torch.eye(count)[torch.arange(self.options.batch_size) % count]

    def _adapter_names(self, names: tuple[str, ...]) -> None:
        rows = [names[row % len(names)] for row in range(self.options.batch_size)]
        self.peft(input_ids=self.ids, adapter_names=rows)

    def _merge_each(self) -> None:
        """Serve without a mixture layer: fold, run one request, restore the weights."""
        names = tuple(self.states)[:DENSE]
        for row, weights in enumerate(self._dense(DENSE).tolist()):
            plain = shared_copy(self.bare, [self.bare.get_submodule(path).weight for path in self.paths])
            fold(plain, combine(dict(zip(names, weights, strict=True)), self.states))
            plain(input_ids=self.ids[row : row + 1])

    def difference(self) -> float:
        """Return the largest difference of the first row's states to those of the model its mixture was merged into."""
        names = tuple(self.states)[:DENSE]
        weights = self._dense(DENSE)
        plain = copy.deepcopy(self.bare)
        fold(plain, combine(dict(zip(names, weights[0].tolist(), strict=True)), self.states))
        with torch.no_grad():
            mine = self._mixed(names, weights)[0]
            return float((mine - plain(input_ids=self.ids[:1]).last_hidden_state[0]).abs().max())
