"""Runs on tiny models and tasks: a few thousand weights, a dozen words, no network, no Ray.

The models are drawn from a fixed seed and saved as Hugging Face folders, so that raycl's real loading is exercised.
"""

import gc
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from raycl import config as configs
from raycl.backbone import Backbone, load_backbone, load_codec
from raycl.bank import Bank, Snapshot
from raycl.generation.batch_answers import predict
from raycl.generation.task_prompts import route_batch
from raycl.methods.registry import method_class
from raycl.routing.router import Router
from raycl.serve.engine.engine_requests import heads_of
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, MultiSnapshotModel
from raycl.serve.snapshots.parts import adapters_of, backbone_of, router_of
from raycl.storage import Storage
from raycl.testing import tiny_models as models
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.records.journal import read_state
from raycl.training.records.progress import read_trace
from raycl.training.records.recorder import Listeners
from raycl.training.setup.run_config import RunConfig
from raycl.training.stream_loop import StreamLoop
from raycl.training.tracking.trackers import Tracker
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORDS = (
    *("red", "blue", "cat", "dog", "the", "a", "is", "sky", "sea", "fire"),
    *("purrs", "barks", "runs", "sleeps", "warm", "cold", "Output", ":", "very", "much"),
)
Stop = models.Stop
"""Raised in place of a crash."""

KINDS = ("bert", "t5", "llama")
"""One model of each kind of backbone: encoder, encoder-decoder, decoder."""

TASKS = {
    "colour": (("red", "fire is warm very"), ("blue", "the sea is cold")),
    "animal": (("cat", "it purrs a sleeps"), ("dog", "the barks runs much")),
}
"""Task -> (label, words of its texts)."""

LINEAR = torch.nn.functional.linear
"""ZeRO-3 has one of its own in all modules until its engine is closed, for which a crash leaves no time."""

TRAIN_ROWS, TEST_ROWS = 14, 6
"""14 rows in batches of 4 leave a last batch of 2."""


def save_model(kind: str, folder: Path) -> Path:
    """Return a Hugging Face folder of a tiny model whose vocabulary holds the words of the tasks."""
    return models.save_model(kind, folder, WORDS)


def save_tasks(root: Path) -> list[dict[str, Any]]:
    """Write JSONL files of two tasks of two labels, and their entries for `stream.tasks`."""
    for name, classes in TASKS.items():
        (root / name).mkdir(parents=True)
        for split, rows in (("train", TRAIN_ROWS), ("test", TEST_ROWS)):
            lines = [_row(classes, number) for number in range(rows)]
            (root / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return [{"name": name, "path": str(root / name)} for name in TASKS]


def save_unseen(root: Path) -> dict[str, Any]:
    """Return a task to test only, whose labels are one of each trained task's, and its entry for `stream.unseen`."""
    (root / "mixed").mkdir()
    lines = [_row(tuple(classes[0] for classes in TASKS.values()), number) for number in range(TEST_ROWS)]
    (root / "mixed" / "test.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return {"name": "mixed", "path": str(root / "mixed")}


def _row(classes: tuple[tuple[str, str], ...], number: int) -> dict[str, str]:
    """Return texts of different lengths: the label's words, turned by `number`, and the word "a"."""
    label, words = classes[number % len(classes)]
    pool = [*words.split(), "a"]
    turned = [pool[(number // 2 + index) % len(pool)] for index in range(2 + number % 4)]
    return {"text": " ".join(turned), "label": label}


def _whole(method: Any) -> bool:
    """Return whether a method, or its learner, trains the backbone's own weights."""
    settings = {"name": method} if isinstance(method, str) else method
    return method_class(settings["name"]).trains_backbone or ("learner" in settings and _whole(settings["learner"]))


class Lab:
    """A folder with the models and tasks, and runs on them."""

    def __init__(self, root: Path) -> None:
        gc.freeze()  # closed engines collect garbage; what the libraries made on import need not be looked through
        self.root = root
        self.tasks: list[dict[str, Any]] = save_tasks(root / "tasks")
        self.unseen: dict[str, Any] = save_unseen(root / "tasks")

    def model_folder(self, kind: str) -> Path:
        """Return the saved model of that kind, made when first asked for."""
        folder = self.root / "models" / kind
        return folder if folder.is_dir() else save_model(kind, folder)

    def tree(self, kind: str, method: Any = "lora", engine: Any = "torch", **sections: Any) -> dict[str, Any]:
        """Return a config tree: 4 steps of 4 rows a task, a checkpoint after the second; `sections` are merged in.

        Args:
            method: name or settings; `separate` or `joint`: LoRA under that schedule; a pair: schedule and method.
        """
        schedule = "sequential"
        if method in ("separate", "joint"):
            schedule, method = method, "lora"
        elif isinstance(method, tuple):
            schedule, method = method
        tree: dict[str, Any] = {
            "stream": {"tasks": self.tasks, "dev_fraction": 0, "max_source_tokens": 24},
            "backbone": {"name": str(self.model_folder(kind)), "dtype": "float32"},
            "method": self.quick(method),
            "engine": engine,
            "train": {"epochs": 1, "batch_size": 4, "learning_rate": 0.01, "log_every_s": 1000},
            "checkpoint": {"every_steps": 2, **({"export": "each"} if _whole(method) else {})},
            "eval": {"batch_size": 4},
        }
        if schedule != "sequential":
            tree["stream"]["schedule"] = schedule
        if kind != "bert":  # no text is generated there
            tree["stream"]["max_target_tokens"] = 4
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
        return tree

    def quick(self, method: Any) -> Any:
        """Return the settings of a method by its name or settings; subclasses make slow ones fast."""
        return {"name": method} if isinstance(method, str) else dict(method)

    def config(self, kind: str, method: Any = "lora", engine: Any = "torch", **sections: Any) -> RunConfig:
        return configs.validate(RunConfig, self.tree(kind, method, engine, **sections))


def run(
    config: RunConfig,
    storage: Storage,
    after: int | None = None,
    on_phase: Callable[[dict[str, Any]], bool | None] | None = None,
    world: DistributedContext | None = None,
    sink: Tracker | None = None,
    takes_over: bool = False,
) -> StreamLoop:
    """Build and run the stream as a worker does, without Ray; `after` steps of this attempt raise Stop.

    Args:
        takes_over: whatever config the run in `storage` was begun with.
    """
    world = world or DistributedContext.alone(torch.device("cpu"))
    context, open_engine = build(config, world)
    if takes_over:
        context.info = replace(context.info, replaces=read_state(storage).fingerprint)
    opened = open_engine if after is None else models.stopping(open_engine, after)
    loop = StreamLoop(context, opened, storage, world, Listeners([sink] if sink is not None else [], on_phase))
    try:
        loop.run()
    finally:
        torch.nn.functional.linear = LINEAR
        if config.engine.name == "deepspeed":
            gc.freeze()  # closing an engine collects garbage: what is left need not be looked through again
    return loop


class SnapshotModel:
    """A snapshot that answers batches by plain passes, without an engine: what engines are compared with."""

    def __init__(self, backbone: Backbone, bank: Bank, snapshot: Snapshot) -> None:
        self.backbone = backbone
        self.snapshot = snapshot
        self.router: Router = router_of(bank, snapshot)
        self.model: MultiSnapshotModel = MultiSnapshotModel(backbone)
        self.loaded: LoadedSnapshot = LoadedSnapshot.of(snapshot, self.router, adapters_of(bank, snapshot))
        self.model.add(self.loaded)

    def predict(self, batch: Batch, texts: Sequence[str], tasks: Sequence[str] | None, limit: int) -> list[str]:
        """Return one answer per example, in the prompts of the batch.

        Args:
            texts: texts to route. tasks: their tasks, where they are known.
        """
        rule = self.loaded.head_rule
        heads = heads_of(self.loaded, tasks) if rule == "label_count" else ()
        batch = replace(batch, texts=tuple(texts))
        mixture = self.loaded.named(route_batch(self.router, self.backbone, self.model.stack, batch, tasks))
        with self.model.activate(mixture, rule, heads):
            return predict(self.backbone, batch, limit)


def opened(bank: Bank, snapshot: Snapshot, device: torch.device | None = None) -> SnapshotModel:
    """Return the snapshot over a freshly loaded backbone, on the CPU unless a device is given."""
    config = backbone_of(snapshot)
    codec = load_codec(config, 24, 4)
    backbone = load_backbone(config, codec, device or torch.device("cpu"), 0)
    return SnapshotModel(backbone, bank, snapshot)


def trace(storage: Storage) -> list[tuple[Any, ...]]:
    """Return what must repeat bit for bit: phase, step, loss, gradient norm, rate and tokens of every step."""
    keys = ("phase", "step", "loss", "grad_norm", "learning_rate", "tokens")
    return [tuple(record[key] for key in keys) for record in read_trace(storage)]


def matrix(storage: Storage) -> list[list[Any]]:
    """Return values of the accuracy matrix, None where it is empty."""
    cells = storage.read_json("results.json")["matrix"]
    return [[cell and cell["value"] for cell in row] for row in cells]


def exported(storage: Storage) -> dict[str, bytes]:
    """Return every exported file with its bytes, and the hashes that the bank's newest snapshot names."""
    folders = [f"learned/{name}" for name in storage.list("learned")]
    files = {
        f"{folder}/{name}": storage.read(f"{folder}/{name}") for folder in folders for name in storage.list(folder)
    }
    newest = Bank(storage.sub("bank")).newest()
    named = {entry.name: entry.tensors.sha256.encode() for entry in newest.adapters} if newest else {}
    return files | named


@dataclass(frozen=True)
class Done:
    """A run without an interruption."""

    config: RunConfig
    storage: Storage
    context: TrainingContext

    def copy(self, folder: Path) -> Storage:
        """Return a copy of the run directory, to be damaged or continued."""
        return Storage.at(shutil.copytree(self.storage.root, folder / "copy"))
