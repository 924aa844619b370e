"""Banks of drawn adapters to serve, and routers over drawn tasks: any number of them, with the cost of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from raycl.backbone import BackboneConfig, identity, load_backbone, load_codec
from raycl.backbone.roles import linear_names, linear_shapes
from raycl.bank import Bank, NewSnapshot
from raycl.bank.branches import Branch
from raycl.bank.manifest import ModelInfo, TaskInfo
from raycl.bank.states import put_router
from raycl.routing.sentence_encoder import EncoderConfig, SentenceEncoder
from raycl.routing.slot_weights import RetrievalConfig
from raycl.routing.slots import SlotRouter
from raycl.routing.statistics import Statistics
from raycl.types import AdapterState, RouterState

PLAIN = "plain"
"""An adapter that adds nothing: the bare backbone with a label head."""

LABELS = ("first", "second", "third", "fourth")
WORDS = "market shares village river phone waiter goal minister engine album novel film plant storm"


WIDTH = 384
"""Dimensions of a query of the packaged sentence encoder."""

LIMITS_MS = {1: 2.0, 32: 0.5}
"""Search, weights and out-of-distribution score per request among 10,000 tasks, by batch size."""

KEPT_TEXTS = 2
"""Dev texts of each task that stay with the router."""


def drawn_router(tasks: int, slots: int, groups: int, top_k: int) -> tuple[SlotRouter, Tensor, Tensor]:
    """Return a router over drawn tasks, its keys `[T, m, c]`, and the queries of 1,024 texts near them."""
    draw = torch.Generator().manual_seed(tasks)
    centres = torch.randn(tasks, WIDTH, generator=draw)
    keys = centres[:, None] + 0.5 * torch.randn(tasks, slots, WIDTH, generator=draw)
    texts = centres[torch.randint(0, tasks, (1024,), generator=draw)]
    texts = texts + 0.7 * torch.randn(texts.shape, generator=draw)
    shared = 50 * 0.33 / WIDTH * torch.eye(WIDTH)
    router = SlotRouter("keys", groups, RetrievalConfig(top_k=top_k))
    for number in range(tasks):
        mean = torch.nn.functional.normalize(centres[number], dim=0)
        router.add(f"t{number}", keys[number].view(slots, groups, -1), Statistics(50, mean, shared))
        router.hold_out(f"t{number}", centres[number] + 0.7 * torch.randn(KEPT_TEXTS, WIDTH, generator=draw))
    return router, keys, texts


def texts_of(count: int, least: int = 14, most: int = 14) -> list[str]:
    """Return different sentences of so many words, each number of them as often as another."""
    words = WORDS.split()

    def word(number: int, position: int) -> str:
        return words[(number * 7 + position * (number % 5 + 1)) % len(words)]

    sizes = [least + number * 11 % (most - least + 1) for number in range(count)]
    return [" ".join(word(number, index) for index in range(size)) + f" {number}" for number, size in enumerate(sizes)]


def drawn(shapes: dict[str, tuple[int, int]], rank: int, draw: torch.Generator, labels: bool = True) -> AdapterState:
    """Return an adapter of small random weights, with or without a label head."""

    def small(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.01

    linears = {path: (small(rank, inputs), small(outputs, rank)) for path, (inputs, outputs) in shapes.items()}
    if not labels:
        return AdapterState(linears)
    return AdapterState(linears, 1.0, None, LABELS, small(len(LABELS), 384), small(len(LABELS)))


def damaged_snapshot(bank: Bank, number: int) -> int:
    """Publish a snapshot with one more adapter, in whose tensors a byte is flipped; the snapshot's number."""
    newest = bank.newest()
    assert newest is not None, "the bank is empty"
    entry = next(entry for entry in newest.adapters if entry.rank)
    layout = newest.layouts[entry.layout]
    draw = torch.Generator().manual_seed(number)
    state = drawn(layout, entry.rank, draw, bool(entry.labels))
    manifest = bank.publish(f"damaged{number}", state, newest.backbone, [f"damaged{number}"])
    data = bytearray(bank.storage.read(manifest.tensors.file))
    data[-1] ^= 1
    bank.storage.write(manifest.tensors.file, bytes(data))
    entries = [(entry, newest.layouts[entry.layout]) for entry in newest.adapters]
    rest = (newest.backbone, newest.router, newest.tasks, newest.encoder)
    fresh = bank.snapshot(NewSnapshot([*entries, manifest], *rest, parent=newest.number, provenance=newest.provenance))
    Branch(bank).advance(fresh, "benchmark")
    return fresh.number


def drawn_bank(folder: Path, name: str, count: int, texts: Sequence[str]) -> Bank:
    """Return `count` adapters of drawn weights, one slot a task, keys around the queries of real sentences."""
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
    model = ModelInfo(name=config.name, sha256=identity(config), kind=codec.kind)
    manifests = [bank.publish(PLAIN, drawn({}, 0, draw, codec.needs_labels), model, [PLAIN])]
    for number in range(count):
        task = f"task{number}"
        near = queries[number % len(queries)] + 0.02 * torch.randn(queries.shape[1], generator=draw)
        router.add(task, near.view(1, 6, -1), Statistics(2, near, torch.zeros(0, 0)))
        manifests.append(bank.publish(f"{task}.0", drawn(shapes, 8, draw, codec.needs_labels), model, [task]))
    state = RouterState("keys", router.settings(), router.tensors(), encoder.config.model_dump(mode="json"))
    kept, encoder_info = put_router(bank, replace(state, encoder_sha256=encoder.fingerprint))
    tasks = [TaskInfo(name=manifest.tasks[0], labels=LABELS if codec.needs_labels else None) for manifest in manifests]
    limits = {"stream": {"max_source_tokens": 64, "max_target_tokens": 32}, "backbone": {"name": config.name}}
    snapshot = bank.snapshot(NewSnapshot(manifests, model, kept, tasks, encoder_info, provenance={"config": limits}))
    Branch(bank).advance(snapshot, "benchmark")
    return bank
