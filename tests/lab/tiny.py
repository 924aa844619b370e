"""Runs of every method on the tiny models and tasks of `raycl.testing.runs`, and quick settings of slow methods."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from axes import sampled
from transformers import PreTrainedTokenizerFast

from raycl.bank import Bank, Snapshot
from raycl.bank.branches import Branch
from raycl.launch import worker
from raycl.launch.driver import RunOptions, job_of
from raycl.launch.local import in_process_worker
from raycl.launch.prepared_run import Prepared
from raycl.methods.base import Method
from raycl.methods.registry import METHODS, method_class, method_config
from raycl.methods.slm import slm
from raycl.methods.wrapper import Wrapper
from raycl.testing import runs, tiny_models
from raycl.testing.runs import (
    KINDS,
    TASKS,
    TEST_ROWS,
    TRAIN_ROWS,
    WORDS,
    Done,
    SnapshotModel,
    Stop,
    exported,
    matrix,
    opened,
    run,
    save_model,
    save_tasks,
    save_unseen,
    trace,
)
from raycl.training.definition.job import Resources
from raycl.training.phase.routing import PublishedRouter
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint
from raycl.training.records.journal import read_state
from raycl.training.records.tensor_objects import SharedReader, TensorObjects
from raycl.training.workers.distributed import DistributedContext

__all__ = [
    "KINDS",
    "TASKS",
    "TEST_ROWS",
    "TRAIN_ROWS",
    "WORDS",
    "Done",
    "SnapshotModel",
    "Stop",
    "evaluated_by",
    "exported",
    "last_checkpoint",
    "matrix",
    "opened",
    "run",
    "save_model",
    "save_tasks",
    "save_unseen",
    "tokenizer",
    "trace",
]

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
    "sdft": {"name": "sdft"},
    "saber": {"name": "saber", "prompt_length": 3, "refine_after": 1, "overlap": 0.0, "batches": 3},
}
"""Methods of backbones that write texts, as encoder-only ones do not; the second one trains on stored rows again."""

RUNS = (*(name for name in METHODS if name not in WRITERS), "separate", "joint")
"""Every other method under the schedule `sequential`, and LoRA under the other two (see `Lab.tree`)."""

PROMPTED = ("l2p", "prompt", "progprompt", "epi")
"""Runs that train soft prompts or prefixes alone."""

BOTTLENECKS = ("adapter", "demix", "hat-adapter", "moram")
"""Runs whose adapters have an activation, so that they are no weight increments."""

NOT_SERVED = ("mbpa++", "idbr")
"""Methods that are evaluated, and publish nothing."""

WHOLE_MODELS = tuple(name for name in METHODS if method_class(name).trains_backbone)
"""Methods that train the backbone's own weights: what they learn is a model, not adapters for a bank."""

DECODERS_ONLY = ("sdft",)
"""Methods of decoder-only backbones."""

LABELS_ONLY = ("idbr",)
"""Methods of encoder-only backbones."""


def fits(kind: str, method: str) -> bool:
    """Return whether a method works with that kind of backbone."""
    if method == "lora-copies":  # names of a LLaMA's modules
        return kind == "llama"
    if method in DECODERS_ONLY:
        return kind == "llama"
    if method.endswith("-experts"):
        return kind == "mixtral"
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
        "prompt_length_by_task": {"colour": 4},
    },
    "sapt-prompt-gate": {
        "name": "sapt",
        "value": "prompt",
        "prompt_form": "gate",
        "prompt_length": 3,
        "prompt_length_by_task": {"animal": 5},
    },
    "slm-sizes": {"name": "slm", "r_by_task": {"animal": 3}, "keys": {"slots_by_task": {"animal": 3, "colour": 5}}},
    "sapt-sizes": {"name": "sapt", "r": 2, "r_by_task": {"animal": 5}},
    "mocl-prefix": {"name": "mocl", "value": "prefix", "prompt_length": 3},
    "mocl-task-id": {"name": "mocl", "task_id": True},
    "sapt-prompt": {"name": "sapt", "value": "prompt", "prompt_length": 3, "attention": {"standardize": False}},
    "lora-dora": {"name": "lora", "use_dora": True, "use_rslora": True},
    "lora-pissa": {"name": "lora", "init_lora_weights": "pissa", "alpha_pattern": {"attention.query": 8}},
    "lora-copies": {"name": "lora", "modules_to_save": ["lm_head", "embed_tokens"]},
    "lora-experts": {"name": "lora", "r": 2, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "sapt-experts": {"name": "sapt", "target_parameters": ["experts.down_proj"]},
    "inclora-patterns": {
        "name": "inclora",
        "init_lora_weights": "gaussian",
        "rank_pattern": {"attention.query": 3},
        "alpha_pattern": {"attention.value": 8},
    },
}
"""Short name -> settings that must keep what their method promises: the ablations DTKR+Adapter, as bottlenecks and as
prefixes, and DTKR+Prompt (SLM, section 4.4) with a residual MLP, tasks of different sizes (SLM, appendix A.9),
SAPT-Prompt behind a gate, and with the paper's queries, which are not standardized, and MoCL with prefixes, and with
the task ids of test texts, and LoRAs with PEFT's settings, on the experts of a Mixtral too."""

RUNS_BY_KIND = (
    *((kind, name) for kind in KINDS for name in (*RUNS, *WRITERS, *VARIANTS) if fits(kind, name)),
    ("mixtral", "lora-experts"),
    ("mixtral", "sapt-experts"),
)
"""Every run on every kind of backbone that it works with."""

SAMPLE = sampled(RUNS_BY_KIND)
"""Every run on one kind of backbone: the suites that look at complete runs of all methods share these."""

slm.PLANE_STEPS = 250
"""Half of t-SNE's steps, the fewest that it takes: no test needs a better map."""


@cache
def family(name: str) -> tuple[Hashable, ...]:
    """Return what a modifier or an engine can see of a run's method: runs that agree in it are one family.

    It is which hooks between a batch and the optimizer the method has, and what it trains: the backbone, an adapter for
    all tasks or one for each. A schedule, and a variant with settings of its own, is a family.
    """
    if name not in METHODS:
        return (name,)
    method = method_class(name)
    hooks = ("prepare_batch", "penalty", "transform_gradients")
    has = (any(hook in kind.__dict__ for kind in method.__mro__ if kind not in (Wrapper, Method)) for hook in hooks)
    return (issubclass(method, Wrapper), *has, method.trains_backbone, method.own_adapters)


@cache
def routing_family(name: str) -> tuple[Hashable, ...]:
    """Return what an endpoint can see of a run's method: runs that agree in it are one family.

    It is which class makes the router, and what that needs of a text. A schedule is a family.
    """
    if name in ("separate", "joint"):
        return (name,)
    config = method_config((VARIANTS | WRITERS).get(name, {"name": name}))
    makers = (kind.__name__ for kind in method_class(config.name).__mro__ if "_router" in kind.__dict__)
    return next(makers, "single"), config.needs_task, config.chooses_task, config.knows_texts


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return the words of the tasks."""
    return tiny_models.word_tokenizer(kind, WORDS)


def last_checkpoint(done: Done) -> Checkpoint:
    """Return the checkpoint at the run's end."""
    objects = TensorObjects(done.storage, done.storage.sub("bank"))
    return read_checkpoint(done.storage, read_state(done.storage).checkpoints[-1], objects)


def evaluated_by(done: Done) -> PublishedRouter:
    """Return the router of the run's last evaluation."""
    router = PublishedRouter.of(done.context.method, last_checkpoint(done))
    assert router is not None
    return router


class Lab(runs.Lab):
    """A folder with the models and tasks, and runs on them, where methods that take long are quick."""

    def slots(self, **settings: Any) -> dict[str, Any]:
        """Return settings of SLM with few steps for keys, over a sentence encoder of a few thousand weights."""
        return {
            "name": "slm",
            "target_modules": ["attention", "ffn"],
            "keys": {"groups": 4, "steps": 40, "start": "data"},
            "encoder": {"name": str(self.model_folder("bert")), "max_tokens": 64},
            **settings,
        }

    def quick(self, method: Any) -> Any:
        """Return the same with SLM over the small sentence encoder and 40 steps for its keys, unless it sets these."""
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
            settings["learner"] = self.quick(settings["learner"])
        return settings


def work(prepared: Prepared, shared: SharedReader | None = None) -> None:
    """Do the work of the one worker of a prepared run, without Ray; its claim decides whose run it is."""
    job = replace(job_of(prepared, RunOptions(in_process=Resources(1.0))), driver="driver")
    with in_process_worker():
        worker.work(job, worker.Worker(DistributedContext.alone(torch.device("cpu")), shared, restarts=True))


def on_main(bank: Bank, snapshot: Snapshot) -> Snapshot:
    """Point branch `main` at the snapshot, whatever it pointed at."""
    Branch(bank).advance(snapshot, "test", lambda head: True)
    return snapshot


Complete = Callable[[str, str, str], Done]
"""(backbone kind, method, engine) -> its complete run."""

Taught = Callable[[str, str], Done]
"""(backbone kind, method) -> a complete run that is long enough to learn its tasks."""
