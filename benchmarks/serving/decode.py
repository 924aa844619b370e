"""Decoding on a decoder beside Hugging Face's `generate`: tokens per second at several streams, first tokens.

raycl's engine, without HTTP, answers streams that come at the same moment, by the bare backbone and under a mixture of
several adapters for each; `generate` answers them one after another, and beside that in one padded batch. No token ends
an answer, so all have the same length. All ways take turns round after round, on the same weights in one process.

The time to a first token is that of one request whose system prompt was read before by another request, over that of
one with a new system prompt of the same length: well below 1 where common beginnings are read once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.figures import Figure, Report, measured
from benchmarks.gpu.adapters import drawn_adapters, loaded
from benchmarks.serving.banks import WORDS, texts_of
from raycl.backbone import Backbone, BackboneConfig, load_backbone, load_codec
from raycl.generation.requests import Event, Failed, Sampling
from raycl.serve.engine.engine_requests import AdapterSelection, EngineRequest, is_last
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, MultiSnapshotModel
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.serve.settings import ServeConfig

LONGEST = 96
"""Tokens of an input at most; prompts that are sent as they are may be longer."""
ALONE, TOGETHER = 1.0, 4.0
"""Tokens per second of one stream and of the most streams, over those of `generate` alone."""
MIXED = 1.15
"""Time of a token under mixtures, over that of the bare backbone."""
SHARED = 0.5
"""Time to a first token with a system prompt that was read before, over that with a new one."""
KEPT_BYTES = ServeConfig.model_fields["prefix_cache_mb"].default * 2**20
"""The bytes that an endpoint keeps of the beginnings of prompts."""
SETTINGS = ("backbone", "streams", "tokens", "adapters", "rank", "rounds", "system_tokens", "dtype", "threads")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores with 135 million parameters."""
    parser.add_argument("--backbone", required=True, help="folder or name of a decoder-only model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--adapters", type=int, default=4, help="in the mixture of each stream")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--system-tokens", type=int, default=256, help="words of a system prompt, about")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads")


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    return measured("decode", options, SETTINGS, lambda: _figures(options), threads=options.threads)


class Streams:
    """An engine and its peer over the same weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tokens = int(options.tokens)
        config = BackboneConfig(name=options.backbone, dtype=options.dtype)
        peer_codec, codec = (load_codec(config, LONGEST, self.tokens) for _ in range(2))
        self.peer = load_backbone(config, peer_codec, torch.device("cpu"), 0)
        self.backbone: Backbone = load_backbone(config, codec, torch.device("cpu"), 0)
        codec.eos_id = self.backbone.model.generation_config.eos_token_id = -1  # no token ends an answer
        model = MultiSnapshotModel(self.backbone, prefix_bytes=KEPT_BYTES)
        targets = ("attention.query", "attention.value")
        adapters = drawn_adapters(self.backbone.model, targets, options.adapters, options.rank)
        self.engine = ServingEngine(model, max(options.streams), LONGEST, self.tokens)
        self.loaded: LoadedSnapshot = loaded(adapters)
        self.engine.load_snapshot(self.loaded)
        self.mixture = dict.fromkeys(adapters, 1 / options.adapters)

    def answer(self, texts: Sequence[str], weights: Mapping[str, float], tokens: int | None = None) -> None:
        """Answer these texts together.

        Args:
            weights: the mixture of each; {}: the bare backbone. tokens: of each answer; None: as the flags say.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        selection, sampling = AdapterSelection(weights), Sampling(tokens or self.tokens)
        for text in texts:
            self.engine.submit(
                EngineRequest(text, events.put, sampling, loaded=self.loaded, selection=selection, templated=False)
            )
        left = len(texts)
        while left:
            event = events.get()
            if isinstance(event, Failed):
                raise event.error
            left -= is_last(event)

    @torch.no_grad()
    def generate(self, texts: Sequence[str], together: bool) -> None:
        """Answer these texts by `generate`, in one padded batch or one after another."""
        codec = self.peer.codec
        for group in [texts] if together else [[text] for text in texts]:
            sources = codec.encode_source(group)
            longest = max(map(len, sources))
            ids = [[codec.pad_id] * (longest - len(source)) + source for source in sources]
            mask = [[0] * (longest - len(source)) + [1] * len(source) for source in sources]
            self.peer.model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=self.tokens,
                min_new_tokens=self.tokens,
                do_sample=False,
                pad_token_id=codec.pad_id,
            )


def _figures(options: argparse.Namespace) -> Iterator[Figure]:
    streams = Streams(options)
    try:
        texts = texts_of(max(options.streams))
        streams.answer(texts[:1], {})
        streams.answer(texts[:1], streams.mixture)
        streams.generate(texts[:1], together=False)
        for count in sorted(options.streams):
            some = texts[:count]
            ways: dict[str, Callable[[], object]] = {
                "bare": partial(streams.answer, some, {}),
                "mixed": partial(streams.answer, some, streams.mixture),
                "one by one": partial(streams.generate, some[:1], together=False),
                "padded": partial(streams.generate, some, together=True),
            }
            yield from _of_streams(count, options, Turns(ways, options.rounds))
        yield from _first_tokens(streams, options)
    finally:
        streams.engine.close()


class Turns:
    """Seconds of several ways, which take turns round after round: by the clock, and of this process's processors.

    On a busy machine the second ratio still says how much work each way is.
    """

    def __init__(self, ways: Mapping[str, Callable[[], object]], rounds: int) -> None:
        self.clock: dict[str, list[float]] = {name: [] for name in ways}
        self.cpu: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name, run in sorted(ways.items(), reverse=bool(number % 2)):
                began, used = time.perf_counter(), time.process_time()
                run()
                self.clock[name].append(time.perf_counter() - began)
                self.cpu[name].append(time.process_time() - used)

    def ratio(self, one: str, other: str, factor: float = 1.0) -> tuple[float, str]:
        """Return the median ratio of two ways' times, times a factor, and words about that of processor time."""
        clock, cpu = (
            factor * median(mine / its for mine, its in zip(times[one], times[other], strict=True))
            for times in (self.clock, self.cpu)
        )
        return clock, f"by processor time {cpu:.2f}"


def _of_streams(count: int, options: argparse.Namespace, turns: Turns) -> Iterator[Figure]:
    """Yield the figures of so many streams; `generate` is timed on one of them, the others take as long."""
    name = f"{count} {'stream' if count == 1 else 'streams'}"
    target = ALONE if count == 1 else TOGETHER if count == max(options.streams) else None
    yield Figure(f"{name}: bare backbone", count * options.tokens / median(turns.clock["bare"]), "tokens/s")
    alone = options.tokens / median(turns.clock["one by one"])
    yield Figure(f"{name}: generate, one text after another", alone, "tokens/s")
    over, detail = turns.ratio("one by one", "bare", count)
    yield Figure(f"{name}: bare over generate, one text after another", over, "x", target, ">=", detail)
    over, detail = turns.ratio("padded", "bare")
    yield Figure(f"{name}: bare over generate, one padded batch", over, "x", detail=detail)
    over, detail = turns.ratio("mixed", "bare")
    detail = f"{options.adapters} adapters for each stream; {detail}"
    yield Figure(f"{name}: time under mixtures over bare", over, "x", MIXED, "<=", detail)


def _first_tokens(streams: Streams, options: argparse.Namespace) -> Iterator[Figure]:
    """Yield the time to a first token with a system prompt that an earlier request had, and with a new one."""
    words = WORDS.split()

    def prompt(system: int, question: int) -> str:
        places = range(options.system_tokens)
        text = " ".join(words[(system * 5 + place * (system % 7 + 1)) % len(words)] for place in places)
        return f"{system} {text}\n{words[question % len(words)]} {question}?"

    questions = itertools.count(1)
    prefixes = streams.engine.model.prefixes

    def ask(is_new: bool, keeps: bool = True) -> None:
        number = next(questions)
        prefixes.max_bytes = KEPT_BYTES if keeps else 0
        streams.answer([prompt(number if is_new else 0, number)], streams.mixture, 1)

    ways: dict[str, Callable[[], object]] = {
        "new": lambda: ask(True),
        "new, with nothing kept": lambda: ask(True, keeps=False),
        "shared": lambda: ask(False),
    }
    ways["shared"]()
    turns = Turns(ways, options.rounds)
    for name, took in turns.clock.items():
        detail = f"{options.system_tokens} words of system prompt, under a mixture"
        yield Figure(f"first token, {name} system prompt", median(took) * 1e3, "ms", detail=detail)
    over, detail = turns.ratio("shared", "new")
    yield Figure("first token, shared over new system prompt", over, "x", SHARED, "<=", detail)
    over, detail = turns.ratio("new", "new, with nothing kept")
    yield Figure("first token, new system prompt over the same with nothing kept", over, "x", detail=detail)
