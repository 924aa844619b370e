"""Costs of routing per request: the encoder; search, weights and out-of-distribution score together.

Also how well the large index finds the true slots.
Keys and texts of the large banks are drawn: every task a centre, its keys and texts around it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Figure, Report, measured
from benchmarks.growth import GrownSlm, steps_s
from benchmarks.serving.banks import LIMITS_MS, WIDTH, drawn_router
from benchmarks.streams.stream import default_models
from raycl.backbone import BackboneConfig, load_backbone, load_codec
from raycl.routing.code_index import KeyIndex, search_threads
from raycl.routing.sentence_encoder import EncoderConfig, SentenceEncoder
from raycl.routing.slot_keys import KeyConfig, cosines, learn_keys, split_groups
from raycl.routing.slots import KINDS, SlotRouter

RECALL = 0.99
EPOCHS, BATCH = 3, 16
"""Settings of the fine-tuning with which key learning is compared."""

SETTINGS = ("tasks", "slots", "groups", "top_k", "threads", "rounds", "texts")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes; the defaults end within five minutes on two cores."""
    parser.add_argument("--tasks", type=int, nargs="+", default=[10, 100, 10_000], help="tasks in the bank")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--texts", type=int, default=5000, help="texts whose keys are learned")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", type=Path, help="folder that holds mini-llama; None: as in the benchmark `stream`")


def measure(options: argparse.Namespace) -> Report:
    """Run everything and report."""
    search_threads(options.threads)
    return measured("retrieval", options, SETTINGS, lambda: _figures(options), threads=options.threads)


def _figures(options: argparse.Namespace) -> Iterator[Figure]:
    yield from (*_encoder(options), *_learning(options), *_share(options))
    for tasks in options.tasks:
        yield from _bank(tasks, options)


TEXT = "the market rose again on monday after a quiet week in which few shares changed hands"


def _encoder(options: argparse.Namespace) -> Iterator[Figure]:
    encoder = SentenceEncoder(EncoderConfig())
    for batch in LIMITS_MS:
        texts = [[f"{TEXT} {n} {row}" for row in range(batch)] for n in range(12)]
        spent = [_ms(partial(encoder.embed, fresh)) for fresh in texts][1:]
        yield Figure(f"encoder, batch {batch}, per request", median(spent) / batch, "ms", detail="17 words, MiniLM")


def _learning(options: argparse.Namespace) -> Iterator[Figure]:
    queries = torch.randn(1, WIDTH) + torch.randn(options.texts, WIDTH)
    config = KeyConfig(groups=options.groups, slots=options.slots)
    spent = _ms(lambda: learn_keys(queries, config, options.top_k, 0)) / 1000
    yield Figure(f"learning keys from {options.texts:,} encoded texts", spent, "s", detail=f"{config.steps:,} steps")
    step, steps = steps_s([GrownSlm(1, BATCH, 8, "keys")])[0], EPOCHS * options.texts // BATCH
    detail = f"{steps} steps of {step * 1e3:,.0f} ms: {EPOCHS} epochs in batches of {BATCH}, 64 tokens, MiniLM"
    yield Figure("share of key learning in fine-tuning", 100 * spent / (step * steps), "%", 10.0, "<=", detail)


def _share(options: argparse.Namespace) -> Iterator[Figure]:
    """Encoder, search, weights and score of one request as part of a whole generation."""
    folder = (options.models or default_models()) / "mini-llama"
    if not folder.is_dir():
        return
    config = BackboneConfig(name=str(folder))
    backbone = load_backbone(config, load_codec(config, 256, 256), torch.device("cpu"), 0)
    ids = torch.tensor([backbone.codec.encode_source([TEXT])[0]])
    settings = {"max_new_tokens": 128, "min_new_tokens": 128, "do_sample": False, "pad_token_id": 0}
    encoder, router = SentenceEncoder(EncoderConfig()), _router(100, options)[0]
    encoder.embed(["warm"])
    spent = _ms(lambda: backbone.model.generate(ids, attention_mask=torch.ones_like(ids), **settings))
    routing = median(_ms(partial(_routed, router, encoder, f"{TEXT} {n}")) for n in range(9))
    detail = f"{routing:.1f} ms of {spent + routing:,.0f} ms, mini-llama, 100 tasks"
    yield Figure(
        "share of routing in a generation of 128 tokens", 100 * routing / (spent + routing), "%", 2.0, "<=", detail
    )


def _routed(router: SlotRouter, encoder: SentenceEncoder, text: str) -> None:
    router.route_scored(encoder.embed([text]))


def _router(tasks: int, options: argparse.Namespace) -> tuple[SlotRouter, Tensor, Tensor]:
    return drawn_router(tasks, options.slots, options.groups, options.top_k)


def _bank(tasks: int, options: argparse.Namespace) -> Iterator[Figure]:
    router, keys, texts = _router(tasks, options)
    name = f"{tasks:,} tasks, {tasks * options.slots * options.groups:,} keys"
    largest = tasks == max(options.tasks)
    for kind in KINDS:
        router.kind = kind
        building = _ms(lambda: router.route_scored(texts[:2]))
        for batch, limit in LIMITS_MS.items():
            starts = range(0, min(len(texts) - batch, options.rounds * batch), batch)
            times = [_ms(partial(router.route_scored, texts[at : at + batch])) for at in starts]
            title = f"{name}: search, weights and score by {kind}, batch {batch}, per request"
            yield Figure(title, median(times) / batch, "ms", limit if largest else None)
        if largest:
            yield Figure(f"{name}: building what {kind} needs", building / 1000, "s")
    if largest:
        yield _recall(
            name, router.index_on(texts.device), texts, keys.view(-1, options.groups, WIDTH // options.groups), options
        )


def _recall(name: str, index: KeyIndex, texts: Tensor, keys: Tensor, options: argparse.Namespace) -> Figure:
    """Return the share of the truly nearest slots that are found, over all groups."""
    queries = split_groups(texts[:256], options.groups)
    result = index.search(queries, options.top_k)[1]
    exact = torch.cat(
        [cosines(part, keys).topk(options.top_k).indices for part in queries.view(-1, 32, *queries.shape[1:])]
    )
    share = (result[..., :, None] == exact[..., None, :]).any(-1).float().mean()
    kind = "exact" if index.exact else "codes, then keys"
    return Figure(f"{name}: recall of the chosen slots", float(share), "", RECALL, ">=", kind)


def _ms(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3
