"""The table of methods: what each keeps, needs and trains, read from the classes (MIGU's table 1, SLM's table 1)."""

from __future__ import annotations

from raycl import config as configs
from raycl.errors import ConfigError, RayclError
from raycl.methods.registry import METHODS, method_class, method_config
from raycl.operations.plan.numbers import opened, phases_of
from raycl.plugins import installed
from raycl.training.setup.run_config import RunConfig

BACKBONES = {"T5-large": "google-t5/t5-large", "MiniLM": "minilm"}
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


def methods_table() -> str:
    """Return the table as Markdown: a row for each method with its default settings, and a line for each of a package
    that has none."""
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
    """Trained on the second task, and kept of each task for itself, without label heads."""
    for backbone, folder in BACKBONES.items():
        try:
            parts = opened(_config(name, folder))
        except RayclError:  # the method is not for such backbones
            continue
        second = list(phases_of(parts.context))[1]
        own = method_class(name).own_adapters
        where = "" if backbone == next(iter(BACKBONES)) else f" ({backbone})"
        return f"{_short(second.count)}{where}", _short(second.adapters) if own else "0"
    raise ConfigError(f"method '{name}' works with none of {', '.join(BACKBONES)}")


def _config(method: str, backbone: str) -> RunConfig:
    tree = {
        "stream": {"name": "builtin", "max_source_tokens": 128, "max_target_tokens": 16},
        "backbone": {"name": backbone},
        "method": {"name": method},
        "train": {"batch_size": 8},
        "eval": {"save_predictions": False},
    }
    return configs.validate(RunConfig, tree)


def _short(count: int) -> str:
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
