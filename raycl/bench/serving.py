"""The endpoint beside its limits, in one run: the model alone, Ray Serve alone, the bare backbone, the mixtures.

(a) the batched model in this process, without Ray; (b) the whole endpoint with a model that answers at once; (c) the
endpoint with the bare backbone and a label head; (c') the same plus one pass of the sentence encoder whose result is
thrown away, which is the price of needing no task id; (d) the endpoint over banks of several sizes.
What it does not know: tasks that mean something.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray import serve

from raycl import config as configs
from raycl.adapters.head import MixedHead
from raycl.backbone import BackboneConfig, identity, load_backbone, load_codec
from raycl.backbone.encoder import EncoderBackbone
from raycl.backbone.roles import linear_names, linear_shapes
from raycl.bank import Bank
from raycl.bank.manifest import ModelFacts, TaskFacts
from raycl.bank.routers import put_router
from raycl.bench.clients import Seen, run_clients
from raycl.bench.figures import Figure, Report, machine
from raycl.bench.stream import default_models
from raycl.data.loader import batch_of
from raycl.retrieval.discriminant import Statistics
from raycl.retrieval.encoder import EncoderConfig, SentenceEncoder
from raycl.retrieval.slots import SlotRouter
from raycl.retrieval.weights import RetrievalConfig
from raycl.serve.app import Endpoint, options_of
from raycl.serve.asks import Ask, Labelled, Made, Started
from raycl.serve.endpoint import start
from raycl.serve.host import Host
from raycl.serve.roster import decide_first
from raycl.serve.settings import ServeConfig
from raycl.types import AdapterState, Mixture, RouterState

log = logging.getLogger(__name__)
BUSY, PLAIN = 0.5, "plain"
EVERY_S = 60.0
"""A replica is killed so often while load is held."""

LABELS = ("first", "second", "third", "fourth")
SETTINGS = ("adapters", "clients", "seconds", "warm_s", "publishes", "threads", "port", "tokens", "soak_s")
KINDS = ("minilm", "mini-llama")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--adapters", type=int, nargs="+", default=[4, 1000], help="adapters in the bank")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="of load for every variant")
    parser.add_argument("--warm-s", type=float, default=15.0, help="of load before a mixed endpoint is measured")
    parser.add_argument("--publishes", type=int, default=10, help="snapshots published while clients ask")
    parser.add_argument("--tokens", type=int, default=32, help="of a generated answer")
    parser.add_argument("--soak-s", type=float, default=0.0, help="load held while a replica is killed every minute")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the replica")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--models", type=Path, help="folder that holds mini-llama; None: as in the benchmark `stream`")


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    before = os.getloadavg()[0]
    notes = [f"the load was {before:.1f} when this began: times say little"] if before > BUSY else []
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = [*_labels(Path(folder), options)]
            if options.soak_s:
                figures += _soak(Path(folder), options)
            llama = (options.models or default_models()) / "mini-llama"
            if llama.is_dir():
                figures += _texts(Path(folder), llama, options)
            else:
                notes.append(f"no generation: {llama} is not there (--models)")
        finally:
            serve.shutdown()
            ray.shutdown()
    settings = {key: value for key, value in vars(options).items() if key in SETTINGS}
    return Report("serve", settings, figures, machine(before), notes)


WORDS = "market shares village river phone waiter goal minister engine album novel film plant storm"


def _texts_of(count: int) -> list[str]:
    words = WORDS.split()

    def word(number: int, place: int) -> str:
        return words[(number * 7 + place * (number % 5 + 1)) % len(words)]

    return [" ".join(word(number, place) for place in range(14)) + f" {number}" for number in range(count)]


# ---- labels ------------------------------------------------------------------------------------------------------


def _labels(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    texts = _texts_of(512)
    banks = {count: _bank(folder / f"labels{count}", "minilm", count, texts) for count in options.adapters}
    small = banks[options.adapters[0]]
    alone, model_ms, text_s = _in_process(texts, options)
    yield Figure("(a) the batched model in process", alone, "/s", detail=f"batches of {options.clients}")
    pinned, free = [{"input": text, "model": PLAIN} for text in texts], [{"input": text} for text in texts]
    seen: dict[str, Seen] = {}
    ones: dict[str, Seen] = {}
    spent_s: dict[str, float] = {}
    variants: list[tuple[str, Any, Bank, list[dict[str, str]]]] = [
        ("b", Instant, small, pinned),
        ("c", Endpoint, small, pinned),
        ("c'", Discarding, small, free),
        *((f"d {count}", Endpoint, bank, free) for count, bank in banks.items()),
    ]
    for name, kind, bank, bodies in variants:
        config = _started(kind, bank, options)
        url = f"http://127.0.0.1:{config.port}/v1/classify"
        first = run_clients(url, bodies, options.clients, options.warm_s if name.startswith("d ") else 2.0)
        if name.startswith("d "):
            yield Figure(f"({name}) answers in the first {options.warm_s:g} s", first.rate, "/s")
        began_s = _busy_s()
        seen[name] = run_clients(url, bodies, options.clients, options.seconds)
        spent_s[name] = (_busy_s() - began_s) / max(1, len(seen[name].ms))
        ones[name] = run_clients(url, bodies, 1, min(3.0, options.seconds))
        yield from _latencies(f"({name})", seen[name])
        if name.startswith("d ") and bank is banks[options.adapters[-1]]:
            yield from _following(bank, url, options)
    ceiling = min(alone, seen["b"].rate)
    yield Figure("(c) over the lesser of (a) and (b)", seen["c"].rate / ceiling, "x", 0.8, ">=")
    cores = psutil.cpu_count() or 1
    detail = f"{cores} cores; CPU: (a) {text_s * 1e3:.1f} ms a text, (b) {spent_s['b'] * 1e3:.1f} ms with its client"
    allowed = min(alone, seen["b"].rate, cores / (text_s + spent_s["b"]))
    yield Figure("(c) over what these cores can do", seen["c"].rate / allowed, "x", detail=detail)
    for count in options.adapters:
        one = seen[f"d {count}"]
        share = 100 * one.facts["retrieval_ms"] / max(1e-9, one.facts["batch"] and sum(one.ms))
        yield Figure(f"(d {count}) over (c')", one.rate / seen["c'"].rate, "x", 0.9, ">=")
        yield Figure(f"(d {count}) retrieval's share of the latency", share, "%")
        yield Figure(f"(d {count}) mean batch", one.facts["batch"] / len(one.ms), "texts")
    added = ones["c"].at(50) - ones["b"].at(50) - model_ms
    detail = f"one client: {ones['c'].at(50):.1f} ms, (b) {ones['b'].at(50):.1f} ms, the model {model_ms:.1f} ms"
    yield Figure("what raycl adds to the median latency", added, "ms", 3.0, "<=", detail)


def _latencies(name: str, seen: Seen) -> Iterator[Figure]:
    detail = f"p50 {seen.at(50):.0f}, p95 {seen.at(95):.0f}, p99 {seen.at(99):.0f} ms, {len(seen.failed)} failed"
    yield Figure(f"{name} answers", seen.rate, "/s", detail=detail)


def _busy_s() -> float:
    """CPU seconds that this machine has worked so far, whoever for."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _in_process(texts: Sequence[str], options: argparse.Namespace) -> tuple[float, float, float]:
    """Texts per second in batches of `clients`, ms of one text alone, and CPU seconds of a text in a batch."""
    torch.set_num_threads(options.threads)
    config = BackboneConfig()
    backbone = load_backbone(config, load_codec(config, 64, 1), torch.device("cpu"), 0)
    assert isinstance(backbone, EncoderBackbone)
    host = Host(backbone)
    host.stack.load(PLAIN, _state({}, 0, torch.Generator().manual_seed(0)))

    def answer(part: Sequence[str]) -> None:
        batch = batch_of(backbone.codec.encode_source(part), backbone.codec.pad_id)
        with torch.no_grad(), host.speaking(Mixture.same({PLAIN: 1.0}, len(part))):
            assert isinstance(backbone.head, MixedHead)
            backbone.head(backbone.pooled(batch)).argmax(1).tolist()

    answer(texts[: options.clients])
    began, cpu, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < options.seconds / 2:
        first = done % (len(texts) - options.clients)
        answer(texts[first : first + options.clients])
        done += options.clients
    rate, text_s = done / (time.perf_counter() - began), (time.process_time() - cpu) / done
    ones = []
    for text in texts[:40]:
        start_s = time.perf_counter()
        answer([text])
        ones.append((time.perf_counter() - start_s) * 1e3)
    return rate, median(ones[5:]), text_s


def _following(bank: Bank, url: str, options: argparse.Namespace) -> Iterator[Figure]:
    """From a snapshot's record in the bank to the first answer made with it, while other clients ask."""
    waits = []
    for _ in range(options.publishes):
        old = bank.newest()
        assert old is not None
        kept = [(entry, old.layouts[entry.layout]) for entry in old.adapters]
        fresh = bank.snapshot(
            kept, old.backbone, old.router, list(old.tasks), old.encoder, parent=old.number, made={"time": time.time()}
        )
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
        made, scores = Made(1, {PLAIN: 1.0}), dict.fromkeys(LABELS, 0.25)

        def submit(ask: Ask) -> None:
            ask.send(Started(made))
            ask.send(Labelled(scores))

        self.service.engine.submit = submit  # type: ignore[method-assign]


class Discarding(Endpoint):
    """The bare backbone and a pass of the sentence encoder whose result is thrown away."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__(tree)
        self.service.roster.close()
        active = self.service.roster.active
        self.service.roster.active = replace(active, router=_Thrown(active.router.encoder))  # type: ignore[attr-defined]


class _Thrown:
    def __init__(self, encoder: SentenceEncoder) -> None:
        self.encoder = encoder

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        self.encoder.embed(texts)
        return Mixture.same({PLAIN: 1.0}, len(texts))


def _started(kind: Any, bank: Bank, options: argparse.Namespace, **settings: Any) -> ServeConfig:
    tree = {"bank": bank.storage.address, "port": options.port, "threads": options.threads, **settings}
    config = configs.validate(ServeConfig, tree)
    decide_first(bank, config)
    start(config, serve.deployment(serve.ingress()(kind), **options_of(config)).bind(configs.as_tree(config)))
    return config


def _soak(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Two replicas under load, one of them killed every minute: what is lost, and does memory grow?"""
    texts = _texts_of(512)
    config = _started(Endpoint, _bank(folder / "soak", "minilm", 16, texts), options, replicas=2, cpus=0.5)
    url = f"http://127.0.0.1:{config.port}/v1/classify"
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(run_clients, url, [{"input": text} for text in texts], options.clients, options.soak_s)
        survivor, kills, before, began = _replicas()[0], 0, 0.0, time.monotonic()
        while not asking.done():
            time.sleep(1.0)
            passed = time.monotonic() - began
            if passed > EVERY_S / 2 and not before:
                before = _memory_mb(survivor)
            others = [name for name in _replicas() if name != survivor]
            if passed > EVERY_S * (kills + 1) and passed < options.soak_s - EVERY_S / 2 and others:
                ray.kill(ray.get_actor(others[0], namespace="serve"))
                kills += 1
        grown = _memory_mb(survivor) - before if before else float("nan")
        seen = asking.result()
    detail = f"{len(seen.ms):,} answers, {kills} replicas killed, {seen.retried} requests sent again"
    yield Figure(f"requests lost in {options.soak_s:.0f} s of load", float(len(seen.failed)), "", 0.0, "<=", detail)
    yield Figure("growth of the replica that lived", grown, "MiB", 50.0, "<=", f"of {before:,.0f} MiB")


def _replicas() -> list[str]:
    """Names of the endpoint's replicas."""
    return sorted(actor["name"] for actor in ray.util.list_named_actors(True) if "#endpoint#" in actor["name"])


def _memory_mb(name: str) -> float:
    """Resident memory of a replica's process."""
    actor = ray.get_actor(name, namespace="serve")
    pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    return float(psutil.Process(int(pid)).memory_info().rss) / 2**20


# ---- texts -------------------------------------------------------------------------------------------------------


def _texts(folder: Path, model: Path, options: argparse.Namespace) -> Iterator[Figure]:
    texts = _texts_of(256)
    bank = _bank(folder / "texts", str(model), 16, texts)
    config = _started(Endpoint, bank, options)
    url = f"http://127.0.0.1:{config.port}/v1/completions"
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
            rates[name].append(seen.facts["tokens"] / seen.seconds)
    per_s = {name: median(found) for name, found in rates.items()}
    detail = f"mini-llama, {options.clients} clients, {options.tokens} tokens an answer at most"
    yield Figure("texts, bare backbone", per_s["bare"], "tokens/s", detail=detail)
    yield Figure("texts, 16 mixtures over the bare backbone", per_s["mixed"] / per_s["bare"], "x", 0.85, ">=")


# ---- banks -------------------------------------------------------------------------------------------------------


def _state(shapes: dict[str, tuple[int, int]], rank: int, draw: torch.Generator, labels: bool = True) -> AdapterState:
    def small(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.01

    linears = {path: (small(rank, inputs), small(outputs, rank)) for path, (inputs, outputs) in shapes.items()}
    if not labels:
        return AdapterState(linears)
    return AdapterState(linears, 1.0, None, LABELS, small(len(LABELS), 384), small(len(LABELS)))


def _bank(folder: Path, name: str, count: int, texts: Sequence[str]) -> Bank:
    """`count` adapters of drawn weights, one slot a task, keys around the queries of real sentences."""
    bank = Bank.at(folder)
    config = BackboneConfig(name=name)
    codec = load_codec(config, 64, 32)
    backbone = load_backbone(config, codec, torch.device("cpu"), 0)
    paths = set(linear_names(backbone.model, ["attention.out"]))
    shapes = {path: shape for path, shape in linear_shapes(backbone.model).items() if path in paths}
    draw = torch.Generator().manual_seed(0)
    encoder = SentenceEncoder(EncoderConfig())
    queries = encoder.embed(texts)
    router = SlotRouter("keys", 6, RetrievalConfig(top_k=1))
    facts = ModelFacts(name=config.name, sha256=identity(config), kind=codec.kind)
    made = [bank.publish(PLAIN, _state({}, 0, draw, codec.needs_labels), facts, [PLAIN])]
    for number in range(count):
        task = f"task{number}"
        near = queries[number % len(queries)] + 0.02 * torch.randn(queries.shape[1], generator=draw)
        router.add(task, near.view(1, 6, -1), Statistics(2, near, torch.zeros(0, 0)))
        made.append(bank.publish(f"{task}.0", _state(shapes, 8, draw, codec.needs_labels), facts, [task]))
    state = RouterState("keys", router.settings(), router.tensors(), encoder.config.model_dump(mode="json"))
    kept, encoder_facts = put_router(bank, replace(state, encoder_sha256=encoder.fingerprint))
    tasks = [TaskFacts(name=manifest.tasks[0], labels=LABELS if codec.needs_labels else None) for manifest in made]
    limits = {"stream": {"max_source_tokens": 64, "max_target_tokens": 32}, "backbone": {"name": config.name}}
    bank.snapshot(made, facts, kept, tasks, encoder_facts, made={"config": limits})
    return bank
