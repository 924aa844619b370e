"""The table of sizes in `cluster/README.md`: large backbones on GPUs of the market, what fits and what limits it.

What it does not know: where the table is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raycl import config as configs
from raycl.run.config import RunConfig
from raycl.run.plan.hardware import GPUS, Cluster
from raycl.run.plan.opening import opened
from raycl.run.plan.report import Report, report
from raycl.run.plan.shapes import engine_of, numbers
from raycl.training.settings import DeepSpeedConfig, EngineConfig, TorchConfig

BACKBONES = {
    "T5-large, 0.7B": "google-t5/t5-large",
    "T5-3B": "google-t5/t5-3b",
    "LLaMA, 7B": "meta-llama/Llama-2-7b-hf",
    "LLaMA, 13B": "meta-llama/Llama-2-13b-hf",
}
"""Name in the table -> hub id (`raycl.backbone.architecture.SIZES`)."""

WAYS: dict[str, tuple[str, EngineConfig]] = {
    "LoRA, torch": ("lora", TorchConfig()),
    "LoRA, ZeRO 3": ("lora", DeepSpeedConfig(zero_stage=3)),
    "all weights, ZeRO 3": ("finetune", DeepSpeedConfig(zero_stage=3)),
}
"""Name in the table -> method and engine."""

COUNTS = (1, 8, 64, 512)

STEPS = (200,) * 5
"""Optimizer steps of each task."""

MICRO, SOURCE, TARGET = 4, 448, 64


def sizes_table() -> str:
    """As Markdown: a row for each backbone, way and number of GPUs, a column for each GPU."""
    lines = [
        f"| backbone | trained, engine | GPUs | {' | '.join(GPUS)} |",
        f"|{'---|' * (3 + len(GPUS))}",
        *(f"| {' | '.join(row)} |" for row in _rows()),
    ]
    return "\n".join(lines)


def _rows() -> Iterator[list[str]]:
    for name, backbone in BACKBONES.items():
        by_method = {method: numbers(opened(_config(backbone, method))) for method, _ in WAYS.values()}
        for way, (method, engine) in WAYS.items():
            model, step, _, run = by_method[method]
            for count in COUNTS:
                divided = engine_of(engine, model, count)
                long_run = replace(run, steps=STEPS)
                found = [report(model, step, divided, long_run, Cluster(gpu, count)) for gpu in GPUS.values()]
                yield [name, way, str(count), *map(_cell, found)]


def _config(backbone: str, method: str) -> RunConfig:
    tree = {
        "stream": {"max_source_tokens": SOURCE, "max_target_tokens": TARGET},
        "backbone": {"name": backbone, "gradient_checkpointing": True},
        "method": {"name": method},
        "train": {"batch_size": MICRO},
        "eval": {"save_predictions": False},
    }
    return configs.validate(RunConfig, tree)


def _cell(found: Report) -> str:
    if not found.fits:
        return f"no: {found.bottleneck} {100 * found.share:.0f} %"
    return f"{found.bottleneck} {100 * found.share:.0f} %, {found.seconds.step:.2g} s"
