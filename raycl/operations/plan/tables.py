"""The table of what each method keeps, needs and trains, read from the classes (MIGU's table 1, SLM's table 1)."""

from itertools import islice

from raycl import config as configs
from raycl.errors import ConfigError, RayclError
from raycl.methods.registry import METHODS, method_class, method_config
from raycl.operations.plan.numbers import opened, phases_of
from raycl.plugins import installed
from raycl.text_tables import short_number
from raycl.training.setup.run_config import RunConfig

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
    """Return the rows of such a table, for JSON: name of a column -> cell."""
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
            backbone_config = {"name": folder, "dropout": 0.1}  # which some methods need
            parts = opened(configs.validate(RunConfig, {"backbone": backbone_config, "method": {"name": name}}))
        except RayclError:  # the method is not for such backbones
            continue
        _, second = islice(phases_of(parts.context), 2)
        own = method_class(name).own_adapters
        where = "" if backbone == next(iter(COUNTED_ON)) else f" ({backbone})"
        return f"{short_number(second.count)}{where}", short_number(second.adapters) if own else "0"
    raise ConfigError(f"method '{name}' works with none of {', '.join(COUNTED_ON)}")
