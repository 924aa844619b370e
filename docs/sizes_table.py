"""The table of large backbones on GPUs of the market in `cluster/README.md`, by the arithmetic of `raycl train --plan`.

    python docs/sizes_table.py

prints it; a test keeps the page true.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from raycl import config as configs
from raycl.operations.plan.arithmetic import GPUS, Cluster
from raycl.operations.plan.numbers import engine_of, numbers, opened
from raycl.operations.plan.report import Report, report
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
            by_kind[method, bits] = numbers(opened(_config(backbone, method, bits)))
        for way, (method, bits, engine) in WAYS.items():
            model, step, _, run = by_kind[method, bits]
            for count in COUNTS:
                divided = engine_of(engine, model, count)
                long_run = replace(run, steps=STEPS)
                reports = [report(model, step, divided, long_run, Cluster(gpu, count)) for gpu in GPUS.values()]
                yield [name, way, str(count), *map(_cell, reports)]


def _config(backbone: str, method: str, quantization: str) -> RunConfig:
    tree = {
        "stream": {"name": "std-1", "max_source_tokens": SOURCE, "max_target_tokens": TARGET},
        "backbone": {"name": backbone, "quantization": quantization, "gradient_checkpointing": True},
        "method": {"name": method},
        "train": {"batch_size": MICRO},
        "eval": {"save_predictions": False},
    }
    return configs.validate(RunConfig, tree)


def _cell(plan: Report) -> str:
    if not plan.fits:
        return f"no: {plan.bottleneck} {100 * plan.share:.0f} %"
    return f"{plan.bottleneck} {100 * plan.share:.0f} %, {plan.seconds.step:.2g} s"


if __name__ == "__main__":
    sys.stdout.write(f"{sizes_table()}\n")
