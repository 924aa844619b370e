"""The same runs on the CPU and on the pretended device, in a process of their own: `pretend_device` changes it.

`main` writes `outcomes.json` in its folder: case -> what each device gave, or the error.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from service_client import Reply
from tiny import VARIANTS, Lab, Stop, matrix, opened, run, trace
from torch import Tensor

from raycl.bank import Bank
from raycl.data.loader import Collate, batch_of, eval_batches
from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.generation.batch_answers import predict
from raycl.generation.requests import Sampling
from raycl.serve.engine.engine_requests import FAILURES, AdapterSelection, EngineRequest
from raycl.serve.engine.multi_snapshot_model import MultiSnapshotModel
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.storage import Storage
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Mixture

ROWS = {"stream": {"train_rows": 10, "test_rows": 4}}
"""Three steps a task: every operation costs Python calls there."""

STOP_AFTER = 5
"""Steps until a run is stopped in its second task, behind the checkpoint of that task's second step."""

TEXTS = ("fire is", "the sea is cold", "is warm very a", "it purrs", "the barks runs much", "purrs a")


@dataclass(frozen=True)
class Case:
    """A run, and the answers of what it left in its bank.

    Attributes:
        served: the bank is asked too. Runs that leave plain LoRAs under a router that other cases have are not.
        decodings: of the engine: at fixed addresses or not.
        tolerance: of losses and gradient norms, relative.
    """

    kind: str
    method: Any = "lora"
    sections: dict[str, Any] = field(default_factory=dict)
    served: bool = False
    decodings: tuple[bool, ...] = (False,)
    tolerance: float = 1e-3


@dataclass(frozen=True)
class Alone(DistributedContext):
    """One worker, whose collectives take tensors of its device alone, as those between GPUs do."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return what is to be summed over workers."""
        assert tensor.device == self.device, f"a tensor on {tensor.device} cannot be summed between {self.device}"
        return super().sum(tensor)


MIGU: dict[str, Any] = {"modifiers": [{"name": "migu", "threshold": 0.5, "skip_first_task": False}]}
CASES: dict[str, Case] = {
    "bert-slm": Case("bert", "slm", served=True),
    "bert-sapt": Case("bert", {"name": "sapt", "arm": {"fraction": 1.0, "weight": 2.0}}, served=True),
    "bert-migu": Case("bert", "finetune", MIGU),
    "bert-migu-clusters": Case(
        "bert", "lora", {"modifiers": [{**MIGU["modifiers"][0], "clusters": 4, "cluster_by": "co_magnitude"}]}
    ),
    "llama-fggm": Case("llama", "lora", {"modifiers": ["fggm"]}),
    "t5-sapt-prompt": Case("t5", VARIANTS["sapt-prompt"], served=True),
    "llama-saber": Case("llama", {"name": "saber", "overlap": 0.0, "criterion": "both", "gap": -9.0}, served=True),
    "t5-epi": Case("t5", "epi", served=True),
    "t5-olora": Case("t5", "olora", served=True),
    "llama-ella": Case("llama", "ella"),
    "llama-moram": Case("llama", "moram", served=True),
    "bert-treelora": Case("bert", "treelora"),
    "bert-osft": Case("bert", "osft"),
    "bert-forever": Case("bert", {"name": "forever", "warm_up": 1, "share": 0.3}),
    "bert-slao": Case("bert", "slao"),
    "llama-gorp": Case("llama", "gorp"),
    "bert-ewc": Case("bert", "ewc"),
    "bert-lwf": Case("bert", "lwf"),
    "llama-sdft": Case("llama", "sdft"),
    "bert-ogd": Case("bert", "ogd"),
    "t5-gainlora": Case("t5", "gainlora", served=True),
    "bert-replay-migu": Case("bert", "replay", MIGU),
    "llama-der++": Case("llama", "der++"),
    "bert-mbpa++": Case("bert", "mbpa++"),
    "bert-idbr": Case("bert", {"name": "idbr", "share": 0.3, "every": 2}),
    "bert-hat": Case("bert", "hat"),
    "t5-hat-adapter": Case("t5", "hat-adapter", served=True),
    "llama-slm": Case("llama", "slm", served=True, decodings=(False, True)),
    "llama-slm-prompt": Case("llama", {"name": "slm", "value": "prompt"}),
    "llama-lora-bfloat16": Case("llama", "lora", {"backbone": {"dtype": "bfloat16"}}, tolerance=0.02),
}
"""Cases of the committed test."""
SIMILAR = ("bert-slm", "bert-migu", "llama-slm-prompt")
"""Cases whose methods and kinds are each in another one too: they run where all do."""


def trained(lab: Lab, case: Case, folder: Path, device: torch.device) -> dict[str, Any]:
    """Return a run on the device: its trace, its matrix, and who answers what of its bank.

    On the pretended device it is stopped and resumed; a resumed run on the CPU is that run bit for bit, as other tests
    show.
    """
    from pretend_device import MODULE

    config = lab.config(case.kind, case.method, **ROWS, **case.sections)
    storage, world = Storage.at(folder), Alone(0, 1, 0, device)
    MODULE.drawn.clear()
    if device.type != "cpu":
        with suppress(Stop):
            run(config, storage, after=STOP_AFTER, world=world)
    context = run(config, storage, world=world).context
    result: dict[str, Any] = {
        "trace": [[loss, norm] for _, _, loss, norm, _, _ in trace(storage)],
        "matrix": matrix(storage),
        "drawn": list(MODULE.drawn),
        "device": str(context.backbone.device),
    }
    if case.served:
        bank = Bank(storage.sub("bank"))
        result["predicted"] = predicted(bank, context, device)
        result["mixed"] = mixed(bank, device)
        result["engine"] = [served(bank, device, static_cache) for static_cache in case.decodings]
    return result


def predicted(bank: Bank, context: Any, device: torch.device) -> list[str]:
    """Return every test example, answered by the newest snapshot in batches."""
    model, answers = opened(bank, bank.open(max(bank.snapshots())), device), list[str]()
    codec = model.backbone.codec
    for task in context.stream.tasks:
        table = context.stream.table(task, "test", codec)
        for batch in eval_batches(Collate([table], codec.pad_id), 3):
            texts = table.texts([row for row in batch.rows.tolist() if row >= 0])
            texts += [""] * (len(batch) - len(texts))
            answers += model.predict(batch.to(device), texts, [task.name] * len(batch), 4)
    return answers


def mixed(bank: Bank, device: torch.device) -> list[list[str]]:
    """Return answers under mixtures of resident adapters: those that all examples share, and rows of each example's
    own."""
    model, result = opened(bank, bank.open(max(bank.snapshots())), device), list[list[str]]()
    names = tuple(model.loaded.keys)
    codec = model.backbone.codec
    ids, *_ = fit_sources([f"{text} warm very much the a is" for text in TEXTS], Prompt(), codec, 24)
    batch = batch_of(ids, codec.pad_id).to(device)
    draw = torch.Generator().manual_seed(0)
    everyone = torch.rand(len(TEXTS), len(names), generator=draw)
    one_each = torch.eye(len(names))[torch.arange(len(TEXTS)) % len(names)] * 3
    for weights in (everyone, one_each, torch.zeros_like(everyone)):
        with model.model.activate(model.loaded.named(Mixture(names, weights))):
            result.append(predict(model.backbone, batch, 6))
    return result


def served(bank: Bank, device: torch.device, static_cache: bool) -> list[Any]:
    """Return answers of the engine to asks that come at once: greedy and drawn texts, or labels."""
    model = opened(bank, bank.open(max(bank.snapshots())), device)
    host = MultiSnapshotModel(model.backbone)
    model.model.stack.detach()
    model.backbone.prefix = None
    engine = ServingEngine(host, 4, 24, 4, static_cache=static_cache)
    try:
        engine.load_snapshot(model.loaded)
        replies = []
        for number, text in enumerate(TEXTS):
            heat = 0.0 if number % 2 else 0.8
            sampling = None if engine.kind == "encoder" else Sampling(8, heat, 0.9 if number % 4 else 1.0, number)
            task = model.loaded.snapshot.tasks[number % 2].name
            reply = Reply()
            engine.submit(
                EngineRequest(text, reply.take, sampling, loaded=model.loaded, selection=AdapterSelection(None, task))
            )
            replies.append(reply)
        return [reply.label if engine.kind == "encoder" else reply.text for reply in replies]
    finally:
        engine.close()


def refused() -> dict[str, bool]:
    """Return whether the device refuses each of these, as CUDA does."""
    from pretend_device import DEVICE

    here, there = torch.ones(3, 4), torch.ones(3, 4, device=DEVICE)
    zero = torch.tensor([0])
    tried: dict[str, Callable[[], Any]] = {
        "sum": lambda: here + there,
        "sum in place": lambda: here.add_(there),
        "scalar in place": lambda: torch.tensor(1.0).add_(there[0, 0]),
        "cat": lambda: torch.cat([here, there]),
        "stack of scalars": lambda: torch.stack([there[0, 0], torch.tensor(1.0)]),
        "rows of the CPU": lambda: here[zero.to(DEVICE)],
        "chosen rows": lambda: there.index_select(0, zero),
        "what is put": lambda: there.index_put_((zero,), torch.ones(4)),
        "numpy": there.numpy,
        "generator": lambda: torch.rand(2, device=DEVICE, generator=torch.Generator()),
    }
    collected = {}
    for name, action in tried.items():
        try:
            action()
            collected[name] = False
        except (RuntimeError, TypeError):
            collected[name] = True
    return collected


def main(folder: Path, names: list[str]) -> None:
    """Run every case on both devices."""
    from pretend_device import CPU, DEVICE

    lab, result = Lab(folder), dict[str, Any](refused=refused())
    for name in names:
        try:
            result[name] = {
                device.type: trained(lab, CASES[name], folder / f"{name}-{device.type}", device)
                for device in (CPU, DEVICE)
            }
        except FAILURES:  # other cases continue
            result[name] = {"error": traceback.format_exc()}
    (folder / "outcomes.json").write_text(json.dumps(result))
