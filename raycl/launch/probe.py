"""The large outputs of a finished run's model for each task's texts, measured in this process (MIGU's figure 5).

The magnitudes are those of the modifier that chooses rows by them, by the same code: |output| summed over the real
tokens of a task's test rows, of source and answer. The rows of a weight that it would update for all of these texts are
the large ones.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from raycl import config as configs
from raycl.bank import Bank
from raycl.config import Tree, trust
from raycl.data.loader import Collate, eval_batches
from raycl.errors import ConfigError, RunError, StorageError
from raycl.launch.prepared_run import run_in
from raycl.methods.base import activate
from raycl.methods.migu.magnitudes import LargeOutputs
from raycl.storage import Storage
from raycl.storage.records import hashed, without_hash
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.evaluation import OBJECTIVE_SEED
from raycl.training.phase.routing import PublishedRouter
from raycl.training.records.bank_start import read_training_state
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.records.journal import RunState
from raycl.training.records.publish import open_bank
from raycl.training.records.resume import newest_resume_point
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch, Task

log: logging.Logger = logging.getLogger("raycl")

FILE = "probe.json"


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of a measurement.

    Attributes:
        rows: test rows of each task. threshold: share of a layer's outputs that are not large.
        layers: roles or regular expressions, as `modifiers.migu.layers`.
    """

    rows: int = 100
    threshold: float = 0.7
    layers: tuple[str, ...] = ("attention", "ffn")

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"the probe is to read {self.rows} rows of each task: expected at least 1")
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"the probe's threshold is {self.threshold:g}: expected at least 0 and less than 1")


def probe(folder: str, settings: ProbeSettings, overrides: Sequence[str] = (), again: bool = False) -> Tree:
    """Return the run's `probe.json`; measured unless it is there with the same settings.

    Args:
        overrides: `key.path=value` of the run's config, such as `stream.root=` where its data lies now.
        again: measure in any case.

    Raises:
        ResumeError: there is no run. RunError: it is not finished, has a model for each task, or its weights are gone.
        ConfigError: an override or a layer does not exist. RayclError: data or backbone cannot be read.
    """
    storage, config, state = run_in(folder)
    wanted: Tree = {**asdict(settings), "layers": list(settings.layers), "overrides": list(overrides)}
    wanted |= {"phases": len(state.phases), "fingerprint": state.fingerprint}
    if not again and (outputs := _kept(storage)).get("settings") == wanted:
        return outputs
    tree = configs.as_tree(config)
    for override in overrides:
        configs.apply_override(tree, override)
    trust.require(trust.requested(tree), overrides, f"the run '{storage.uri}'", "")
    measured = {"settings": wanted, **_measured(configs.validate(RunConfig, tree), storage, state, settings)}
    storage.write_json(FILE, hashed(measured))
    return measured


def _kept(storage: Storage) -> Tree:
    """Return what was measured before; {} where nothing was, or its file is damaged."""
    try:
        return without_hash(storage.read_json(FILE), f"{storage.uri}/{FILE}") if storage.exists(FILE) else {}
    except StorageError as error:
        log.warning("it is measured again: %s", error)
        return {}


def _measured(config: RunConfig, storage: Storage, state: RunState, settings: ProbeSettings) -> dict[str, Any]:
    world = DistributedContext.alone()
    context, _ = build(config, world)
    if context.schedule.one_model_per_task:
        raise RunError(f"the run '{storage.uri}' has a model for each task: give runs of one model for all tasks")
    if not state.phases or len(state.phases) < len(context.phases):
        raise RunError(
            f"the run '{storage.uri}' has finished {len(state.phases)} of {len(context.phases)} phases: continue it "
            f"with raycl train --resume {storage.address}"
        )
    tasks = [task for phase in context.phases[: len(state.phases)] for task in phase.tasks]
    untrained = _large_outputs(context, tasks, settings)
    done = _last(config, storage, state, world)
    context.method.load_state_dict(done.method, done.frozen_state)
    context.load_learned(done.parameters)
    router = PublishedRouter.of(context.method, done)
    models = {"untrained": untrained, "trained": _large_outputs(context, tasks, settings, router)}
    return {"tasks": [task.name for task in tasks], "models": models}


def _last(config: RunConfig, storage: Storage, state: RunState, world: DistributedContext) -> Checkpoint:
    bank = open_bank(config.bank, storage)
    objects = TensorObjects(storage, bank.storage)
    published = state.phases[-1].get("bank")
    if not any(storage.exists(f"checkpoints/{name}") for name in state.checkpoints):
        if not published:
            raise RunError(
                f"the weights of '{storage.uri}' are gone: its checkpoints were removed, and a method that trains the "
                "whole model publishes to no bank; train it again"
            )
        at = Bank.at(published["bank"]) if published["bank"] else bank
        return read_training_state(at, at.open(published["snapshot"]), TensorObjects(storage, at.storage))[0]
    checkpoint = newest_resume_point(storage, state, world, objects).checkpoint
    assert checkpoint is not None, "phases are recorded"
    if checkpoint.covers < len(state.phases):
        raise RunError(
            f"the last checkpoint of '{storage.uri}' is damaged: repair it with raycl train --resume {storage.address}"
        )
    return checkpoint


def _large_outputs(
    context: TrainingContext, tasks: Sequence[Task], settings: ProbeSettings, router: PublishedRouter | None = None
) -> dict[str, Any]:
    """Return layer -> for each task, the large outputs (`LargeOutputs.large`); without `router`, without adapters."""
    backbone = context.backbone
    backbone.eval()
    observed = LargeOutputs(backbone, settings.layers, settings.threshold)
    try:
        large = [_large_outputs_of(context, task, settings.rows, observed, router) for task in tasks]
    finally:
        observed.close()
    return {path: [of_task[path] for of_task in large] for path in large[0]}


@torch.no_grad()
def _large_outputs_of(
    context: TrainingContext, task: Task, rows: int, observed: LargeOutputs, router: PublishedRouter | None
) -> dict[str, dict[str, Any]]:
    backbone, method, codec = context.backbone, context.method, context.backbone.codec
    table = context.stream.table(task, "test", codec)
    if not len(table):
        raise RunError(f"task '{task.name}' has no test rows: give a run whose tasks all have some")
    table = table.part(np.arange(min(rows, len(table))))
    alone = DistributedContext.alone(backbone.device)
    if method.encoder is not None and router is not None:
        texts = [context.router_texts.words(task, text) for text in table.texts(range(len(table)))]
        method.encoder.embed_all(texts, (alone.rank, alone.size), alone.gather)
    objective = context.stream.text_objective(codec, OBJECTIVE_SEED)
    read: Callable[[Batch], object] = backbone.score_labels if codec.needs_labels and objective is None else backbone
    collate = Collate([table], codec.pad_id, None, method.config.needs_texts, objective, context.router_texts)
    observed.clear()
    for batch in eval_batches(collate, context.evaluation.batch_size):
        batch = batch.to(backbone.device)
        with activate(method, None if router is None else router.mixture(batch, task.name)):
            observed.observe(read, batch)
    return observed.large()
