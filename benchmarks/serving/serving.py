"""The endpoint beside its limits, in one run: the model alone, Ray Serve alone, the bare backbone, the mixtures.

(a) the batched model in this process, without Ray; (b) the whole endpoint with a model that answers at once; (c) the
endpoint with the bare backbone and a label head; (c') the same plus one pass of the sentence encoder whose result is
thrown away, which is the price of needing no task id; (d) the endpoint over banks of several sizes.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray import serve

from benchmarks.figures import Figure, Report, measured
from benchmarks.serving.banks import LABELS, PLAIN, drawn, drawn_bank, texts_of
from benchmarks.serving.clients import Seen, run_clients
from benchmarks.serving.soak import FASTEST, soak
from benchmarks.streams.stream import default_models
from raycl import config as configs
from raycl.backbone import BackboneConfig, load_backbone, load_codec
from raycl.bank import Bank, NewSnapshot
from raycl.bank.branches import Branch
from raycl.data.loader import batch_of
from raycl.generation.requests import LabelScores, ResponseMetadata, Started
from raycl.routing.routers import TextRouter
from raycl.serve.deployment.app import Endpoint, options_of
from raycl.serve.deployment.application import start
from raycl.serve.engine.engine_requests import EngineRequest
from raycl.serve.engine.multi_snapshot_model import MultiSnapshotModel
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import decide_first
from raycl.types import Mixture

log = logging.getLogger(__name__)
PAUSE_S = 0.012
"""The least time between two texts of one client."""

UNLIKE = 20_000
"""Number of texts: none is sent twice."""

SETTINGS = (
    *("adapters", "clients", "seconds", "rounds", "warm_s", "publishes"),
    *("threads", "dtype", "ingress", "port", "tokens", "soak_s"),
)
KINDS = ("minilm", "mini-llama")

UNLIKE_WORDS = (4, 50)
"""Words of the shortest and the longest of texts of unlike lengths."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--adapters", type=int, nargs="+", default=[4, 1000], help="adapters in the bank")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=12.0, help="of load for every variant")
    parser.add_argument("--rounds", type=int, default=3, help="in which the variants take turns")
    parser.add_argument("--warm-s", type=float, default=10.0, help="of load before a mixed endpoint is measured")
    parser.add_argument("--publishes", type=int, default=5, help="snapshots published under load")
    parser.add_argument("--tokens", type=int, default=32, help="of a generated answer")
    parser.add_argument("--soak-s", type=float, default=0.0, help="load held while a replica is killed every minute")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the replica")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the backbone")
    parser.add_argument(
        "--ingress", choices=["direct", "proxy"], default="direct", help="as in the endpoint's settings"
    )
    parser.add_argument("--port", type=int, default=8765, help="the first of several")
    parser.add_argument("--models", type=Path, help="folder that holds mini-llama; None: as in the benchmark `stream`")


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    notes: list[str] = []
    return measured("serve", options, SETTINGS, lambda: _figures(options, notes), notes=notes)


def _figures(options: argparse.Namespace, notes: list[str]) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield from _labels(Path(folder), options)
            serve.shutdown()
            if options.soak_s:
                yield from soak(
                    lambda bank: _started(Endpoint, bank, options, replicas=2, cpus=0.5), Path(folder), options
                )
            llama = (options.models or default_models()) / "mini-llama"
            if llama.is_dir():
                yield from _texts(Path(folder), llama, options)
            else:
                notes.append(f"no generation: {llama} does not exist (--models)")
        finally:
            if ray.is_initialized():  # else Serve would start one to end it
                serve.shutdown()
                ray.shutdown()


# ---- labels ------------------------------------------------------------------------------------------------------


def _labels(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Measure variants in turn while all are up, since machines change their speed from minute to minute."""
    texts = texts_of(UNLIKE)
    banks = {count: drawn_bank(folder / f"labels{count}", "minilm", count, texts[:512]) for count in options.adapters}
    small = banks[options.adapters[0]]
    pinned, free = [{"input": text, "model": PLAIN} for text in texts], [{"input": text} for text in texts]
    variants: list[tuple[str, Any, Bank, list[dict[str, str]]]] = [
        ("b", Instant, small, pinned),
        ("c", Endpoint, small, pinned),
        ("c'", Discarding, small, free),
        *((f"d {count}", Endpoint, bank, free) for count, bank in banks.items()),
    ]
    model = InProcessModel(options)
    rounds = Rounds(model, texts, options)
    for index, (name, kind, bank, bodies) in enumerate(variants):
        url = f"{_started(kind, bank, options, index, cpus=0.1)}/v1/classify"
        rounds.load_tests[name] = LoadTest(url, bodies)
        first = rounds.load_tests[name].by(options.clients, options.warm_s if name.startswith("d ") else 2.0)
        if name.startswith("d "):
            yield Figure(f"({name}) answers in the first {options.warm_s:g} s", first.rate, "/s")
    unlike = texts_of(UNLIKE, *UNLIKE_WORDS)
    bodies = [{"input": text, "model": PLAIN} for text in unlike]
    rounds.load_tests["c unlike"] = LoadTest(rounds.load_tests["c"].url, bodies)
    for _ in range(options.rounds):
        rounds.measure()
    yield from rounds.figures()
    count = min(len(item.ms) for item in rounds.seen["c unlike"])
    tokens = [model.tokens(some[:count]) for some in (unlike, texts)]
    ratio = _ratio(*([item.rate for item in rounds.seen[name]] for name in ("c unlike", "c"))) * tokens[0] / tokens[1]
    detail = f"{UNLIKE_WORDS[0]} to {UNLIKE_WORDS[1]} words, {tokens[0] / count:.0f} tokens on average"
    yield Figure("texts of unlike lengths over (c), tokens per second", ratio, "x", 0.75, ">=", detail)
    yield from _following(banks[options.adapters[-1]], rounds.load_tests[variants[-1][0]].url, options)


@dataclass
class LoadTest:
    """Requests to one variant, none twice unless it is very fast: a text seen before has its query remembered."""

    url: str
    bodies: Sequence[dict[str, str]]
    sent: int = 0

    def by(self, clients: int, seconds: float) -> Seen:
        """Run so many clients for so long."""
        some = [self.bodies[(self.sent + number) % len(self.bodies)] for number in range(int(FASTEST * seconds))]
        seen = run_clients(self.url, some, clients, seconds)
        self.sent += len(seen.ms) + len(seen.failed)
        return seen


class Rounds:
    """The measurements of every variant, round by round.

    Attributes:
        load_tests: variant -> its requests.
    """

    def __init__(self, model: InProcessModel, texts: Sequence[str], options: argparse.Namespace) -> None:
        self.model, self.texts, self.options = model, texts, options
        self.load_tests: dict[str, LoadTest] = {}
        self.alone: list[tuple[float, float]] = []
        self.seen: dict[str, list[Seen]] = {}
        self.spent_s: dict[str, float] = {}
        self.added: list[tuple[float, float, float]] = []

    def measure(self) -> None:
        """Measure one round: each variant for its share of the seconds, then one client at a time."""
        seconds = self.options.seconds / self.options.rounds
        self.alone.append(self.model.batches(self.texts, seconds / 2))
        for name, load_test in self.load_tests.items():
            began_s = _busy_s()
            self.seen.setdefault(name, []).append(load_test.by(self.options.clients, seconds))
            self.spent_s[name] = self.spent_s.get(name, 0.0) + _busy_s() - began_s
        instant, bare = (self.load_tests[name].by(1, min(2.0, seconds)).at(50) for name in ("b", "c"))
        self.added.append((instant, bare, self.model.one_ms(self.texts)))

    def figures(self) -> Iterator[Figure]:
        """Yield the medians over the rounds; ratios are taken within each."""
        rates = {name: [item.rate for item in seen] for name, seen in self.seen.items()}
        alone = [rate for rate, _ in self.alone]
        yield Figure("(a) the batched model in process", median(alone), "/s", detail=f"batches of {self.model.batch}")
        for name, seen in self.seen.items():
            numbers = [number for item in seen for number in item.ms]
            at = [f"p{percent} {np.percentile(numbers, percent):.0f}" for percent in (50, 95, 99)]
            failed = sum(len(item.failed) for item in seen)
            yield Figure(f"({name}) answers", median(rates[name]), "/s", detail=f"{', '.join(at)} ms, {failed} failed")
        ceilings = [min(pair) for pair in zip(alone, rates["b"], strict=True)]
        yield Figure("(c) over the lesser of (a) and (b)", _ratio(rates["c"], ceilings), "x", 0.85, ">=")
        cores, text_s = psutil.cpu_count() or 1, median(cpu_s for _, cpu_s in self.alone)
        spent = {
            name: spent_s / sum(len(item.ms) for item in self.seen[name]) for name, spent_s in self.spent_s.items()
        }
        allowed = [min(ceiling, cores / (text_s + spent["b"])) for ceiling in ceilings]
        detail = f"{cores} cores; CPU a text: (a) {text_s * 1e3:.1f} ms, (b) {spent['b'] * 1e3:.1f} ms with its client"
        detail += f", (c) {spent['c'] * 1e3:.1f}"
        yield Figure("(c) over what these cores can do", _ratio(rates["c"], allowed), "x", detail=detail)
        for name in [name for name in self.seen if name.startswith("d ")]:
            ms = sum(sum(item.ms) for item in self.seen[name])
            metrics = {key: sum(item.metrics[key] for item in self.seen[name]) for key in ("retrieval_ms", "batch")}
            yield Figure(f"({name}) over (c')", _ratio(rates[name], rates["c'"]), "x", 0.95, ">=")
            yield Figure(f"({name}) retrieval's share of the latency", 100 * metrics["retrieval_ms"] / ms, "%")
            count = sum(len(item.ms) for item in self.seen[name])
            yield Figure(f"({name}) mean batch", metrics["batch"] / count, "texts")
        added = median(mixed - instant - model for instant, mixed, model in self.added)
        instant, mixed, model = (median(part) for part in zip(*self.added, strict=True))
        detail = f"one client: {mixed:.1f} ms, (b) {instant:.1f} ms, the model {model:.1f} ms"
        yield Figure("what raycl adds to the median latency", added, "ms", 3.0, "<=", detail)


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return median(item / other for item, other in zip(mine, theirs, strict=True))


def _busy_s() -> float:
    """Return the CPU seconds that this machine has worked so far, for all processes."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


class InProcessModel:
    """The model in this process, without Ray: texts to labels."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        self.batch = int(options.clients)
        config = BackboneConfig(dtype=options.dtype)
        backbone = load_backbone(config, load_codec(config, 64, 1), torch.device("cpu"), 0)
        self.backbone, self.host = backbone, MultiSnapshotModel(backbone)
        self.host.stack.load(PLAIN, drawn({}, 0, torch.Generator().manual_seed(0)))

    def answer(self, texts: Sequence[str]) -> None:
        """Answer one batch."""
        backbone = self.backbone
        batch = batch_of(backbone.codec.encode_source(texts), backbone.codec.pad_id)
        with torch.no_grad(), self.host.activate(Mixture.same({PLAIN: 1.0}, len(texts))):
            scores, _ = backbone.score_labels(batch)
            scores.argmax(1).tolist()

    def batches(self, texts: Sequence[str], seconds: float) -> tuple[float, float]:
        """Return texts per second in full batches, and CPU seconds of a text."""
        self.answer(texts[: self.batch])
        began, cpu, done = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < seconds:
            first = done % (len(texts) - self.batch)
            self.answer(texts[first : first + self.batch])
            done += self.batch
        return done / (time.perf_counter() - began), (time.process_time() - cpu) / done

    def tokens(self, texts: Sequence[str]) -> int:
        """Return how many tokens the backbone reads of texts."""
        return sum(map(len, self.backbone.codec.encode_source(texts)))

    def one_ms(self, texts: Sequence[str]) -> float:
        """Measure one text alone after a pause as between two requests, when caches are cold."""
        collected = []
        for text in texts[:30]:
            time.sleep(PAUSE_S)
            start_s = time.perf_counter()
            self.answer([text])
            collected.append((time.perf_counter() - start_s) * 1e3)
        return median(collected)


def _following(bank: Bank, url: str, options: argparse.Namespace) -> Iterator[Figure]:
    """Measure the time from a snapshot's record to the first answer with it, under load."""
    waits = []
    for _ in range(options.publishes):
        old = bank.newest()
        assert old is not None
        kept = [(entry, old.layouts[entry.layout]) for entry in old.adapters]
        fresh = bank.snapshot(
            NewSnapshot(
                kept,
                old.backbone,
                old.router,
                list(old.tasks),
                old.encoder,
                parent=old.number,
                provenance={"time": time.time()},
            )
        )
        Branch(bank).advance(fresh, "benchmark")
        began = time.perf_counter()
        while True:
            seen = run_one(url, {"input": "which snapshot is this"})
            if seen == fresh.number:
                break
            assert time.perf_counter() - began < 60, "the new snapshot never answered"
        waits.append(time.perf_counter() - began)
    detail = f"{len(waits)} snapshots, median {median(waits):.2f} s, most of it the poll of 0.5 s"
    yield Figure("from publish to the first answer, p95", float(np.percentile(waits, 95)), "s", 2.0, "<=", detail)


def run_one(url: str, body: dict[str, Any]) -> int:
    """Ask once; the number of the snapshot that answered."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["data"][0]["raycl"]["snapshot"])


class Instant(Endpoint):
    """The whole endpoint with a model that answers at once: what Ray Serve and the wire cost."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__(tree)
        metadata, scores = ResponseMetadata(1, {PLAIN: 1.0}), dict.fromkeys(LABELS, 0.25)

        def submit(request: EngineRequest) -> None:
            request.send(Started(metadata))
            request.send(LabelScores(scores))

        self.service.engine.submit = submit  # type: ignore[method-assign]


class Discarding(Endpoint):
    """The bare backbone and a pass of the sentence encoder whose result is thrown away."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__(tree)
        self.service.snapshot_manager.close()
        active = self.service.snapshot_manager.active
        assert isinstance(active.router, TextRouter)
        self.service.snapshot_manager.active = replace(active, router=_DiscardingRouter(active.router))


class _DiscardingRouter(TextRouter):
    """Embeds the texts and discards the result."""

    def __init__(self, router: TextRouter) -> None:
        super().__init__(router.router, router.encoder, {})

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        self.encoder.embed(texts)
        return Mixture.same({PLAIN: 1.0}, len(texts))


def _started(kind: Any, bank: Bank, options: argparse.Namespace, node_index: int | None = None, **settings: Any) -> str:
    """Bring a variant up; its URL.

    Args:
        node_index: number of its application, where several are up at once: behind the proxy the first part of its
            paths names it, and one that listens itself has a port of its own.
    """
    tree: dict[str, Any] = {"bank": bank.storage.address, "threads": options.threads, "dtype": options.dtype}
    direct = options.ingress == "direct"
    name = None if node_index is None else f"variant{node_index}"
    prefix = "/" if direct or name is None else f"/{name}"
    tree |= {
        "ingress": options.ingress,
        "port": options.port + (node_index or 0) * direct,
        "route_prefix": prefix,
        **settings,
    }
    config = configs.validate(ServeConfig, tree)
    decide_first(bank, config)
    application = serve.deployment(serve.ingress()(kind), **options_of(config)).bind(configs.as_tree(config))
    start(config, application, name, replace=True)
    return f"http://127.0.0.1:{config.port}{prefix.rstrip('/')}"


# ---- texts -------------------------------------------------------------------------------------------------------


def _texts(folder: Path, model: Path, options: argparse.Namespace) -> Iterator[Figure]:
    texts = texts_of(256)
    bank = drawn_bank(folder / "texts", str(model), 16, texts)
    url = f"{_started(Endpoint, bank, options)}/v1/completions"
    names = [f"task{number}.0" for number in range(16)]
    common = {"max_tokens": options.tokens, "raycl": {"template": False}}
    bare = [{"prompt": text, "model": "base", **common} for text in texts]
    mixed = [
        {"prompt": text, **common, "raycl": {"adapters": {names[n % 16]: 0.6, names[(n + 5) % 16]: 0.4}}}
        for n, text in enumerate(texts)
    ]
    rates: dict[str, list[float]] = {"bare": [], "mixed": []}
    run_clients(url, mixed, options.clients, 2.0)
    for number in range(4):  # in turn, since machines change their speed
        for name, bodies in sorted({"bare": bare, "mixed": mixed}.items(), reverse=bool(number % 2)):
            seen = run_clients(url, bodies, options.clients, options.seconds / 2)
            rates[name].append(seen.metrics["tokens"] / seen.seconds)
    per_s = {name: median(rate) for name, rate in rates.items()}
    detail = f"mini-llama, {options.clients} clients, {options.tokens} tokens an answer at most"
    yield Figure("texts, bare backbone", per_s["bare"], "tokens/s", detail=detail)
    yield Figure("texts, 16 mixtures over the bare backbone", per_s["mixed"] / per_s["bare"], "x", 0.85, ">=")
