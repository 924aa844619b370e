"""`raycl predict` beside the model's own batch loop, and the memory that it takes while rows stream through it.

The peer routes and answers the same texts in batches of the same size, sorted by length within the same windows, in
this process and without an engine, files or records.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.figures import Figure, Report, machine
from benchmarks.serving.banks import drawn_bank, texts_of
from raycl.backbone import BackboneConfig, load_backbone, load_codec
from raycl.data.loader import batch_of
from raycl.data.sources.fields import Columns
from raycl.generation.batch_answers import predict as answer
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, MultiSnapshotModel
from raycl.serve.offline.model import WINDOW, OfflineModel
from raycl.serve.offline.prediction_files import write_predictions
from raycl.serve.offline.prediction_input import Input, files_at
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import adapters_of, router_of
from raycl.storage import Storage
from raycl.training.records.named_bank import snapshot_at

log = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes."""
    parser.add_argument("--rows", type=int, default=6000, help="rows of a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, in turn")
    parser.add_argument("--adapters", type=int, default=20, help="adapters of the bank")
    parser.add_argument("--batch", type=int, default=32, help="rows computed together")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads")


def measure(options: argparse.Namespace) -> Report:
    """Return rows per second of both, in turn, and the memory that the rounds after the first one add."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        figures = _figures(Path(folder), options)
    settings = {name: getattr(options, name) for name in ("rows", "rounds", "adapters", "batch", "threads")}
    return Report("predict", settings, figures, machine(load))


def _figures(folder: Path, options: argparse.Namespace) -> list[Figure]:
    texts = texts_of(options.rows * options.rounds)
    backbone = BackboneConfig()
    bank = drawn_bank(folder / "bank", backbone.name, options.adapters, texts[:64])
    _, snapshot = snapshot_at(bank.storage.address)
    config = ServeConfig(bank=bank.storage.address, device="cpu", threads=options.threads, max_batch=options.batch)
    with OfflineModel.open(bank, snapshot, config) as model:
        peer = MultiSnapshotModel(load_backbone(backbone, load_codec(backbone, 64, 1), torch.device("cpu"), 0))
        loaded = LoadedSnapshot.of(snapshot, router_of(bank, snapshot), adapters_of(bank, snapshot))
        peer.add(loaded)
        ours, theirs, memory = [], [], []
        process = psutil.Process()
        for number in range(options.rounds):
            fresh = texts[number * options.rows : (number + 1) * options.rows]  # no text is encoded twice
            file = folder / f"{number}.jsonl"
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in fresh))
            given = Input(files_at([str(file)]), Columns(label=()))
            began = time.perf_counter()
            write_predictions(model, given, Storage.at(folder / f"out{number}"))
            ours.append(options.rows / (time.perf_counter() - began))
            theirs.append(options.rows / _loop_s(peer, loaded, fresh, options.batch))
            memory.append(process.memory_info().rss)
            log.info("round %d: %.0f rows/s, loop %.0f", number + 1, ours[-1], theirs[-1])
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    grown = (memory[-1] - memory[0]) / 2**20
    return [
        Figure("rows per second", median(ours), "rows/s"),
        Figure("the model's own batch loop", median(theirs), "rows/s"),
        Figure("predict over the loop", median(ratios), "x", 0.9, ">="),
        Figure("memory added by the later rounds", grown, "MiB", 50.0, detail="resident, after the first round"),
    ]


@torch.no_grad()
def _loop_s(model: MultiSnapshotModel, loaded: LoadedSnapshot, texts: Sequence[str], size: int) -> float:
    """Return seconds for all texts."""
    codec = model.backbone.codec
    began = time.perf_counter()
    for first in range(0, len(texts), WINDOW * size):
        window = sorted(texts[first : first + WINDOW * size], key=len, reverse=True)
        for start in range(0, len(window), size):
            part = window[start : start + size]
            with model.activate(loaded.mixture(part)):
                answer(model.backbone, batch_of(codec.encode_source(part), codec.pad_id), 1)
    return time.perf_counter() - began
