"""Tiny models, tasks and runs for the suites that train: a few thousand weights, a dozen words, no network.

The models are drawn from a fixed seed and saved as Hugging Face folders, so that raycl's real loading is exercised.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from raycl import config as configs
from raycl.backbone import Backbone, load_backbone, load_codec
from raycl.bank import Bank, Snapshot
from raycl.bank.branches import Branch
from raycl.generation.batch_answers import predict
from raycl.generation.route_batch import route_batch
from raycl.launch import worker
from raycl.launch.driver import RunOptions, job_of
from raycl.launch.local import in_process_worker
from raycl.launch.prepared_run import Prepared
from raycl.methods.registry import METHODS, method_class
from raycl.routing.memory_slots import key_maps
from raycl.run.assembly import build
from raycl.run.config import RunConfig
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, MultiSnapshotModel
from raycl.serve.engine.request_mixtures import heads_of
from raycl.serve.snapshots.parts import adapters_of, backbone_of, router_of
from raycl.storage import Storage
from raycl.testing import tiny_models as models
from raycl.tracking import MetricsSink
from raycl.training.distributed import DistributedContext
from raycl.training.job import Resources
from raycl.training.phase.routing import PublishedRouter
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint
from raycl.training.records.journal import read_state
from raycl.training.records.progress import read_trace
from raycl.training.records.tensor_objects import SharedReader, TensorObjects
from raycl.training.stream_loop import StreamLoop
from raycl.training.training_context import TrainingContext
from raycl.types import Batch

WORDS = (
    *("red", "blue", "cat", "dog", "the", "a", "is", "sky", "sea", "fire"),
    *("purrs", "barks", "runs", "sleeps", "warm", "cold", "Output", ":", "very", "much"),
)
Stop = models.Stop
"""What stands for a crash."""

KINDS = ("bert", "t5", "llama")
"""One model of each kind of backbone: encoder, encoder-decoder, decoder."""

TASKS = {
    "colour": (("red", "fire is warm very"), ("blue", "the sea is cold")),
    "animal": (("cat", "it purrs a sleeps"), ("dog", "the barks runs much")),
}
"""Task -> (label, words of its texts)."""

WRITERS: dict[str, Any] = {
    "lfpt5": {"name": "lfpt5", "prompt_length": 3, "max_tokens": 12, "draws": 4},
    "lfpt5-real": {
        "name": "lfpt5",
        "prompt_length": 3,
        "max_tokens": 12,
        "source": "real",
        "share": 0.1,
        "kd_weight": 1.0,
    },
}
"""Methods whose model writes texts, which encoder-only backbones do not; the second one trains on stored rows again."""

RUNS = (*(name for name in METHODS if name not in WRITERS), "separate", "joint")
"""Every other method under the schedule `sequential`, and LoRA under the other two (see `Lab.tree`)."""

PROMPTED = ("l2p", "prompt", "progprompt", "epi")
"""Runs that train soft prompts or prefixes alone."""

BOTTLENECKS = ("adapter", "demix", "hat-adapter")
"""Runs whose adapters have an activation, so that they are no weight increments."""

NOT_SERVED = ("mbpa++", "idbr")
"""Methods that are evaluated, and publish nothing."""

LABELS_ONLY = ("idbr",)
"""Methods of encoder-only backbones."""


def fits(kind: str, method: str) -> bool:
    """Whether a method works with that kind of backbone."""
    return method not in (WRITERS if kind == "bert" else LABELS_ONLY)


WITH_WEIGHTS = tuple(name for name in RUNS if name not in (*PROMPTED, *NOT_SERVED))
"""Runs that train weights of the model or of linears, which can be masked."""

EXPORTED = tuple(name for name in WITH_WEIGHTS if name not in BOTTLENECKS)
"""Runs whose weights can be exported: PEFT has no bottlenecks with an activation."""

ENGINES: dict[str, Any] = {
    "torch": "torch",
    "fsdp": "fsdp",
    **{f"zero{phase}": {"name": "deepspeed", "zero_stage": phase} for phase in range(4)},
}
"""Short name -> config node."""

VARIANTS: dict[str, Any] = {
    "slm-adapter": {"name": "slm", "value": "adapter", "retrieval": {"rule": "vote"}},
    "slm-prefix": {"name": "slm", "value": "prefix", "prompt_length": 3, "retrieval": {"rule": "vote"}},
    "slm-prompt-mlp": {
        "name": "slm",
        "value": "prompt",
        "prompt_length": 2,
        "retrieval": {"rule": "vote"},
        "prompt_form": "mlp",
        "prompt_mlp_width": 5,
        "prompt_length_by_task": {"colour": 4},
    },
    "sapt-prompt-gate": {
        "name": "sapt",
        "value": "prompt",
        "prompt_form": "gate",
        "prompt_length": 3,
        "prompt_length_by_task": {"animal": 5},
    },
    "slm-sizes": {"name": "slm", "rank_by_task": {"animal": 3}, "keys": {"slots_by_task": {"animal": 3, "colour": 5}}},
    "sapt-sizes": {"name": "sapt", "rank": 2, "rank_by_task": {"animal": 5}},
    "mocl-prefix": {"name": "mocl", "value": "prefix", "prompt_length": 3},
    "mocl-task-id": {"name": "mocl", "task_id": True},
    "sapt-prompt": {"name": "sapt", "value": "prompt", "prompt_length": 3, "attention": {"standardize": False}},
}
"""Short name -> settings that must keep what their method promises: the ablations DTKR+Adapter, as bottlenecks and as
prefixes, and DTKR+Prompt (SLM, section 4.4) with a residual MLP, tasks of different sizes (SLM, appendix A.9),
SAPT-Prompt behind a gate, and with the paper's queries, which are not standardized, and MoCL with prefixes, and with
the task ids of test texts."""

RUNS_BY_KIND = tuple((kind, name) for kind in KINDS for name in (*RUNS, *WRITERS, *VARIANTS) if fits(kind, name))
"""Every run on every kind of backbone that it works with."""

LINEAR = torch.nn.functional.linear
"""ZeRO-3 has one of its own in all modules until its engine is closed, for which a crash leaves no time."""

key_maps.STEPS = 250
"""Half of t-SNE's steps, the fewest that it takes: no test needs a better map."""

TRAIN_ROWS, TEST_ROWS = 14, 6
"""14 rows in batches of 4 leave a last batch of 2."""


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """The words of the tasks."""
    return models.word_tokenizer(kind, WORDS)


def save_model(kind: str, folder: Path) -> Path:
    """A Hugging Face folder of a tiny model whose vocabulary holds the words of the tasks."""
    return models.save_model(kind, folder, WORDS)


def save_tasks(root: Path) -> list[dict[str, Any]]:
    """JSONL files of two tasks of two labels, and their entries for `stream.tasks`."""
    for name, classes in TASKS.items():
        (root / name).mkdir(parents=True)
        for split, rows in (("train", TRAIN_ROWS), ("test", TEST_ROWS)):
            lines = [_row(classes, number) for number in range(rows)]
            (root / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return [{"name": name, "path": str(root / name)} for name in TASKS]


def save_unseen(root: Path) -> dict[str, Any]:
    """A task to test only, whose labels are one of each trained task's, and its entry for `stream.unseen`."""
    (root / "mixed").mkdir()
    lines = [_row(tuple(classes[0] for classes in TASKS.values()), number) for number in range(TEST_ROWS)]
    (root / "mixed" / "test.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return {"name": "mixed", "path": str(root / "mixed")}


def _row(classes: tuple[tuple[str, str], ...], number: int) -> dict[str, str]:
    """Texts of different lengths: the label's words, turned by `number`, and the word "a"."""
    label, words = classes[number % len(classes)]
    pool = [*words.split(), "a"]
    turned = [pool[(number // 2 + place) % len(pool)] for place in range(2 + number % 4)]
    return {"text": " ".join(turned), "label": label}


def _whole(method: Any) -> bool:
    """Whether a method, or its learner, trains the backbone's own weights."""
    settings = {"name": method} if isinstance(method, str) else method
    return method_class(settings["name"]).trains_backbone or ("learner" in settings and _whole(settings["learner"]))


class Lab:
    """A folder with the models and tasks, and runs on them."""

    def __init__(self, root: Path) -> None:
        gc.freeze()  # closed engines collect garbage; what the libraries made on import need not be looked through
        self.root = root
        self.tasks = save_tasks(root / "tasks")
        self.unseen = save_unseen(root / "tasks")

    def model_folder(self, kind: str) -> Path:
        """The saved model of that kind, made when first asked for."""
        folder = self.root / "models" / kind
        return folder if folder.is_dir() else save_model(kind, folder)

    def slots(self, **settings: Any) -> dict[str, Any]:
        """SLM whose keys are learned in no time, over a sentence encoder of a few thousand weights."""
        return {
            "name": "slm",
            "targets": ["attention", "ffn"],
            "keys": {"groups": 4, "steps": 40, "start": "data"},
            "encoder": {"name": str(self.model_folder("bert")), "max_tokens": 64},
            **settings,
        }

    def tree(self, kind: str, method: Any = "lora", engine: Any = "torch", **sections: Any) -> dict[str, Any]:
        """A config tree: 4 steps of 4 rows a task, a checkpoint after the second; `sections` are merged in.

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
            "method": self._quick(method),
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

    def _quick(self, method: Any) -> Any:
        """The same with SLM over the small sentence encoder and 40 steps for its keys, unless it sets these."""
        settings = {"name": method} if isinstance(method, str) else dict(method)
        if settings["name"] == "slm":
            groups = {} if "encoder" in settings else {"groups": 4}  # of its 32 dimensions
            settings["keys"] = {"steps": 40, **groups, **settings.get("keys", {})}
            settings.setdefault("encoder", {"name": str(self.model_folder("bert")), "max_tokens": 64})
        if settings["name"] == "das":
            settings.setdefault("general", False)  # the models have no dropout
        if settings["name"] == "mbpa++":
            settings.setdefault("every", 2)
            settings.setdefault("adapt", {"steps": 2, "neighbours": 3, "rate": 0.05})
            settings.setdefault("encoder", {"name": str(self.model_folder("bert")), "max_tokens": 64})
        if "learner" in settings:
            settings["learner"] = self._quick(settings["learner"])
        return settings

    def config(self, kind: str, method: Any = "lora", engine: Any = "torch", **sections: Any) -> RunConfig:
        """The same, validated."""
        return configs.validate(RunConfig, self.tree(kind, method, engine, **sections))


def run(
    config: RunConfig,
    storage: Storage,
    after: int | None = None,
    on_phase: Callable[[dict[str, Any]], bool | None] | None = None,
    world: DistributedContext | None = None,
    sink: MetricsSink | None = None,
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
    loop = StreamLoop(context, opened, storage, world, sink, on_phase=on_phase)
    try:
        loop.run()
    finally:
        torch.nn.functional.linear = LINEAR
        if config.engine.name == "deepspeed":
            gc.freeze()  # closing an engine collects garbage: what is left need not be looked through again
    return loop


def work(prepared: Prepared, shared: SharedReader | None = None) -> None:
    """What the one worker of a prepared run does, without Ray: whose run it is decides its claim."""
    job = replace(job_of(prepared, RunOptions(in_process=Resources(1.0))), driver="driver")
    with in_process_worker():
        worker.work(job, worker.Worker(DistributedContext.alone(torch.device("cpu")), shared, restarts=True))


class SnapshotModel:
    """A snapshot that answers batches by plain passes, without an engine: what engines are compared with."""

    def __init__(self, backbone: Backbone, bank: Bank, snapshot: Snapshot) -> None:
        self.backbone, self.snapshot, self.router = backbone, snapshot, router_of(bank, snapshot)
        self.model = MultiSnapshotModel(backbone)
        self.loaded = LoadedSnapshot.of(snapshot, self.router, adapters_of(bank, snapshot))
        self.model.add(self.loaded)

    def predict(self, batch: Batch, texts: Sequence[str], tasks: Sequence[str] | None, limit: int) -> list[str]:
        """One answer per example, in the prompts of the batch.

        Args:
            texts: what is routed. tasks: where they are known.
        """
        rule = self.loaded.head_rule
        heads = heads_of(self.loaded, tasks) if rule == "label_count" else ()
        batch = replace(batch, texts=tuple(texts))
        mixture = self.loaded.named(route_batch(self.router, self.backbone, self.model.stack, batch, tasks))
        with self.model.activate(mixture, rule, heads):
            return predict(self.backbone, batch, limit)


def opened(bank: Bank, snapshot: Snapshot, device: torch.device | None = None) -> SnapshotModel:
    """The snapshot over a freshly loaded backbone, on the CPU unless a device is given."""
    config = backbone_of(snapshot)
    codec = load_codec(config, 24, 4)
    backbone = load_backbone(config, codec, device or torch.device("cpu"), 0)
    return SnapshotModel(backbone, bank, snapshot)


def on_main(bank: Bank, snapshot: Snapshot) -> Snapshot:
    """Branch `main` points at the snapshot, whatever it pointed at."""
    Branch(bank).advance(snapshot, "test", lambda head: True)
    return snapshot


def trace(storage: Storage) -> list[tuple[Any, ...]]:
    """What must repeat bit for bit: phase, step, loss, gradient norm, rate and tokens of every step."""
    keys = ("phase", "step", "loss", "grad_norm", "learning_rate", "tokens")
    return [tuple(record[key] for key in keys) for record in read_trace(storage)]


def matrix(storage: Storage) -> list[list[Any]]:
    """Values of the accuracy matrix, None where it is empty."""
    cells = storage.read_json("results.json")["matrix"]
    return [[cell and cell["value"] for cell in row] for row in cells]


def exported(storage: Storage) -> dict[str, bytes]:
    """Every exported file with its bytes, and the hashes that the bank's newest snapshot names."""
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
        """A copy of the run directory, to be damaged or continued."""
        return Storage.at(shutil.copytree(self.storage.root, folder / "copy"))


def last_checkpoint(done: Done) -> Checkpoint:
    """That of the run's end."""
    objects = TensorObjects(done.storage, done.storage.sub("bank"))
    return read_checkpoint(done.storage, read_state(done.storage).checkpoints[-1], objects)


def evaluated_by(done: Done) -> PublishedRouter:
    """The router of the run's last evaluation."""
    found = PublishedRouter.of(done.context.method, last_checkpoint(done))
    assert found is not None
    return found


Complete = Callable[[str, str, str], Done]
"""(backbone kind, method, engine) -> its complete run."""

Taught = Callable[[str, str], Done]
"""(backbone kind, method) -> a complete run that is long enough to learn its tasks."""
