"""The tables of pages: large backbones on GPUs of the market (`cluster/README.md`), and what each method keeps, needs
and trains, read from the classes (MIGU's table 1, SLM's table 1).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from raycl import config as configs
from raycl.errors import ConfigError, RayclError
from raycl.methods.registry import METHODS, method_class, method_config
from raycl.operations.plan.arithmetic import GPUS, Cluster
from raycl.operations.plan.numbers import engine_of, numbers, opened, phases_of
from raycl.operations.plan.report import Report, report
from raycl.plugins import installed
from raycl.text_tables import short_number
from raycl.training.definition.settings import DeepSpeedConfig, EngineConfig, FSDPConfig, TorchConfig
from raycl.training.setup.run_config import RunConfig

BACKBONES = {
    "T5-large, 0.7B": "google-t5/t5-large",
    "T5-3B": "google-t5/t5-3b",
    "LLaMA, 7B": "meta-llama/Llama-2-7b-hf",
    "LLaMA, 13B": "meta-llama/Llama-2-13b-hf",
}
"""Name in the table -> hub id (`raycl.backbone.architecture.SIZES`)."""

WAYS: dict[str, tuple[str, str, EngineConfig]] = {
    "LoRA, torch": ("lora", "none", TorchConfig()),
    "LoRA on nf4, torch": ("lora", "nf4", TorchConfig()),
    "LoRA, fsdp": ("lora", "none", FSDPConfig()),
    "all weights, ZeRO 3": ("finetune", "none", DeepSpeedConfig(zero_stage=3)),
}
"""Name in the table -> method, quantization of the backbone, and engine."""

COUNTS = (1, 8, 64, 512)

STEPS = (200,) * 4
"""Optimizer steps of each task."""

MICRO, SOURCE, TARGET = 4, 448, 64


def sizes_table() -> str:
    """Return the table as Markdown: a row for each backbone, way and number of GPUs, a column for each GPU."""
    lines = [
        f"| backbone | trained, engine | GPUs | {' | '.join(GPUS)} |",
        f"|{'---|' * (3 + len(GPUS))}",
        *(f"| {' | '.join(row)} |" for row in _rows()),
    ]
    return "\n".join(lines)


def _rows() -> Iterator[list[str]]:
    for name, backbone in BACKBONES.items():
        kinds = {(method, bits) for method, bits, _ in WAYS.values()}
        by_kind = {}
        for method, bits in sorted(kinds):  # a stream of four tasks whose data is not read
            settings = {"quantization": bits, "gradient_checkpointing": True}
            config = _config(backbone, method, "std-1", (SOURCE, TARGET), MICRO, **settings)
            by_kind[method, bits] = numbers(opened(config))
        for way, (method, bits, engine) in WAYS.items():
            model, step, _, run = by_kind[method, bits]
            for count in COUNTS:
                divided = engine_of(engine, model, count)
                long_run = replace(run, steps=STEPS)
                reports = [report(model, step, divided, long_run, Cluster(gpu, count)) for gpu in GPUS.values()]
                yield [name, way, str(count), *map(_cell, reports)]


def _config(backbone: str, method: str, stream: str, tokens: tuple[int, int], batch: int, **settings: Any) -> RunConfig:
    source, target = tokens
    tree = {
        "stream": {"name": stream, "max_source_tokens": source, "max_target_tokens": target},
        "backbone": {"name": backbone, **settings},
        "method": {"name": method},
        "train": {"batch_size": batch},
        "eval": {"save_predictions": False},
    }
    return configs.validate(RunConfig, tree)


def _cell(plan: Report) -> str:
    if not plan.fits:
        return f"no: {plan.bottleneck} {100 * plan.share:.0f} %"
    return f"{plan.bottleneck} {100 * plan.share:.0f} %, {plan.seconds.step:.2g} s"


COUNTED_ON = {"T5-large": "google-t5/t5-large", "MiniLM": "minilm"}
"""Name in the table -> backbone. Parameters are counted on the first one that a method works with."""

HEAD = (
    "method",
    "keeps data of earlier tasks",
    "task id in training",
    "task id at test",
    "fine-tuning",
    "pre-training",
    "parameters trained on a task",
    "kept for each task",
)


def records(table: str) -> list[dict[str, str]]:
    """Return the rows of one of these tables, for JSON: name of a column -> cell."""
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n") if line.startswith("|")
    )
    return [dict(zip(head, row, strict=True)) for row in rows]


def methods_table() -> str:
    """Return a Markdown table with a row for each method by default, and a line for each package's that has none."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", *(f"| {' | '.join(row(name))} |" for name in METHODS)]
    left_out = []
    for name in (plugin.name for plugin in installed("method") if plugin.name not in METHODS):
        try:
            lines.append(f"| {' | '.join(row(name))} |")
        except RayclError as error:
            left_out.append(f"\nnot in the table: {error}")
    return "\n".join([*lines, *left_out])


def row(name: str) -> list[str]:
    """Return the cells of one method, in the order of `HEAD`."""
    config = method_config({"name": name})
    traits = (config.keeps_data, config.task_id_in_training, config.needs_task, config.fine_tunes, config.pre_trains)
    shown = f"`{name}` around `lora`" if config.innermost is not config else f"`{name}`"
    return [shown, *("yes" if trait else "no" for trait in traits), *_parameters(name)]


def _parameters(name: str) -> tuple[str, str]:
    """Return what is trained on the second task, and what is kept of each task, without label heads."""
    for backbone, folder in COUNTED_ON.items():
        try:
            parts = opened(_config(folder, name, "builtin", (128, 16), 8))
        except RayclError:  # the method is not for such backbones
            continue
        _, second = islice(phases_of(parts.context), 2)
        own = method_class(name).own_adapters
        where = "" if backbone == next(iter(COUNTED_ON)) else f" ({backbone})"
        return f"{short_number(second.count)}{where}", short_number(second.adapters) if own else "0"
    raise ConfigError(f"method '{name}' works with none of {', '.join(COUNTED_ON)}")
