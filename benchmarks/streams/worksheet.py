"""The work of one comparison written down: texts, answers, and which rows make which micro-batch.

The plain loop must do the same steps and evaluations without using the platform's data code; it gets this plain tree of
strings and numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raycl.backbone import load_codec
from raycl.data.loader import Collate, GlobalOrder, Loader, eval_batches
from raycl.data.stream import Stream, open_stream
from raycl.data.tokens import TokenTable
from raycl.errors import ConfigError
from raycl.methods.single_adapter import LoraConfig
from raycl.training.optimizers.registry import optimizer_kind
from raycl.training.phase.data import stable_seed
from raycl.training.setup.run_config import RunConfig, phases
from raycl.types import Batch, Phase, TextCodec

Sheet = dict[str, Any]


def write_down(config: RunConfig, threads: int) -> Sheet:
    """Return what one worker with `config` does, as a JSON-able tree.

    Raises:
        ConfigError: a text or answer would be cut.
    """
    assert isinstance(config.method, LoraConfig), "the plain loop supports LoRA only"
    codec = load_codec(config.backbone, *config.stream.token_limits)
    stream = open_stream(config.stream, config.seed)
    train, values = config.train, optimizer_kind(config.train).values
    plan = phases(config, stream)
    return {
        "backbone": config.backbone.model_dump(mode="json"),
        "limits": list(config.stream.token_limits),
        "kind": codec.kind,
        "lora": {"r": config.method.r, "lora_alpha": config.method.lora_alpha},
        "optimizer": {"lr": train.learning_rate, "betas": values["betas"], "eps": values["epsilon"]},
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "max_new_tokens": config.eval.max_new_tokens or codec.max_target_tokens,
        "threads": threads,
        "seed": config.seed,
        "tasks": [_task(config, stream, phase, codec) for phase in plan],
    }


def _task(config: RunConfig, stream: Stream, phase: Phase, codec: TextCodec) -> Sheet:
    task, train = phase.tasks[0], config.train
    tables = {split: stream.table(task, split, codec) for split in ("train", "test")}
    prompt = stream.prompt(task, codec)
    order = GlobalOrder(
        len(tables["train"]),
        train.batch_size,
        train.epochs_of(phase.name),
        stable_seed(config.seed, "order", phase.index),
        train.max_steps,
    )
    micro = train.examples_per_pass(1)
    loader = Loader(Collate([tables["train"]], codec.pad_id), order, micro)
    batches = eval_batches(Collate([tables["test"]], codec.pad_id), config.eval.batch_size)
    return {
        "name": task.name,
        "labels": task.labels,
        "train": _pairs(tables["train"], prompt.prefix, prompt.suffix),
        "test": _pairs(tables["test"], prompt.prefix, prompt.suffix),
        "steps": [_real(loader.micro_batches(step)) for step in range(order.steps)],
        "test_batches": _real(batches),
    }


def _pairs(table: TokenTable, prefix: str, suffix: str) -> list[tuple[str, str]]:
    """Whole prompts with the answer to learn, row by row."""
    cut = table.truncated_sources + table.truncated_targets
    if cut:
        raise ConfigError(
            f"{cut} texts of task '{table.task.name}' are longer than the token limits: the plain loop cuts nothing, "
            "so raise stream.max_source_tokens and stream.max_target_tokens"
        )
    rows = range(len(table))
    texts, references = table.texts(rows), table.references(rows)
    return [(f"{prefix}{text}{suffix}", names[0]) for text, names in zip(texts, references, strict=True)]


def _real(batches: Iterable[Batch]) -> list[list[int]]:
    """Return rows of each batch without the fill-ups; batches of fill-ups alone are left out."""
    rows = [[row for row in batch.rows.tolist() if row >= 0] for batch in batches]
    return [batch for batch in rows if batch]
