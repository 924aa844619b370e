"""Names of Transformers' `TrainingArguments`, accepted where they mean the same as a setting of a run.

`num_train_epochs=5`, at the top of a config or in `train`, is `train.epochs=5`. They are renamed where files and
overrides are read, so an override replaces what a file says under either name.

`per_device_train_batch_size` and `gradient_accumulation_steps` say how many examples a step has only together with the
number of workers: see `batch_of_workers`.
"""

from typing import Any

from raycl.errors import ConfigError

SAME = ("learning_rate", "weight_decay", "warmup_ratio", "warmup_steps", "max_grad_norm", "max_steps")
"""Names that `train` has too; at the top of a config they mean those."""

PATHS = {name: f"train.{name}" for name in (*SAME, "group_by_length")} | {
    "num_train_epochs": "train.epochs",
    "lr_scheduler_type": "train.lr_scheduler",
    "optim": "train.optimizer",
    "bf16": "backbone.dtype",
    "train_sampling_strategy": "train.group_by_length",
    "gradient_checkpointing": "backbone.gradient_checkpointing",
    "activation_checkpointing": "backbone.gradient_checkpointing",
    "per_device_train_batch_size": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
}
"""Name -> dotted path of the setting."""

RANKS = ("rank", "lora_rank")
"""Names of other trainers for PEFT's `r`, which spelling does not lead to; a hint alone."""

VALUES: dict[str, dict[Any, Any]] = {
    "bf16": {True: "bfloat16", False: "float32"},
    "train_sampling_strategy": {"group_by_length": True, "random": False},
    "optim": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit"},
}
"""Name -> its values that are written differently here."""

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


def renamed(key: str, value: Any, source: str) -> tuple[str, Any]:
    """Return the path and value of a setting that may have a name of `TrainingArguments`.

    Args:
        key: dotted path, as written. source: names what wrote it in errors.

    Raises:
        ConfigError: a value that means nothing here.
    """
    above, _, name = key.rpartition(".")
    base, _, section = above.rpartition(".") if above != "base" else (above, "", "")
    if name not in PATHS or section not in ("", "train") or base not in ("", "base"):
        return key, value
    if name == "num_train_epochs" and isinstance(value, float):
        if value != int(value):
            raise ConfigError(f"{source}: num_train_epochs is {value}: expected whole passes over a task's rows")
        value = int(value)
    if name == "bf16" and value not in (True, False):
        raise ConfigError(f"{source}: bf16 is {value!r}: expected true or false")
    if name == "train_sampling_strategy" and value not in VALUES[name]:
        raise ConfigError(f"{source}: train_sampling_strategy is {value!r}: expected {' or '.join(VALUES[name])}")
    if name == "warmup_steps" and isinstance(value, float) and 0 < value < 1:
        name = "warmup_ratio"  # as in version 5 of Transformers
    known = VALUES.get(name, {})
    value = known[value] if isinstance(value, bool | str) and value in known else value
    return f"{base}.{PATHS[name]}" if base else PATHS[name], value


def rename_in(tree: dict[str, Any], source: str) -> None:
    """Rename settings of a config tree, in place.

    Raises:
        ConfigError: a setting stands there under two names, with two values.
    """
    nodes = [("", tree), *((f"{name}.", tree[name]) for name in ("train", "base") if isinstance(tree.get(name), dict))]
    if isinstance(tree.get("base"), dict) and isinstance(tree["base"].get("train"), dict):
        nodes.append(("base.train.", tree["base"]["train"]))
    for prefix, node in nodes:
        for name in [name for name in node if name in PATHS]:
            path, value = renamed(f"{prefix}{name}", node[name], source)
            if path != f"{prefix}{name}":
                del node[name]
                _put(tree, path.split("."), value, f"{source}: {name}={value} and {path}")


def _put(tree: dict[str, Any], parts: list[str], value: Any, both: str) -> None:
    for part in parts[:-1]:
        child = tree.get(part)
        if isinstance(child, str):  # a backbone's name alone
            child = {"name": child}
        tree[part] = tree = child if isinstance(child, dict) else {}
    if tree.get(parts[-1], value) != value:
        raise ConfigError(f"{both}={tree[parts[-1]]} are the same setting with two values: give one of them")
    tree[parts[-1]] = value


def batch_of_workers(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a run's config tree with the batch that `per_device_train_batch_size` and `gradient_accumulation_steps`
    mean.

    A step then has rows of a device, times workers, times accumulation steps, as with Transformers' trainer.

    Raises:
        ValueError: `train.batch_size` is another number, or accumulation has no rows of a device.
    """
    train = tree.get("train")
    if not isinstance(train, dict) or not any(name in train for name in BATCH):
        return tree
    rest = {key: value for key, value in train.items() if key not in BATCH}
    rows = train.get(BATCH[0], train.get("micro_batch_size"))
    launch = tree.get("launch")
    workers = launch.get("workers", 1) if isinstance(launch, dict) else 1
    steps = train.get(BATCH[1], 1)
    if rows is None:
        raise ValueError(f"{BATCH[1]} is {steps}, and {BATCH[0]} is missing: give the examples of a forward pass too")
    if not all(isinstance(count, int) and count > 0 for count in (rows, workers, steps)):
        raise ValueError(f"{BATCH[0]} is {rows!r} and {BATCH[1]} is {steps!r}: expected whole numbers above zero")
    batch = rows * workers * steps
    if rest.get("batch_size", batch) != batch:
        raise ValueError(
            f"train.batch_size is {rest['batch_size']}, and {BATCH[0]} {rows} x {workers} workers x "
            f"{BATCH[1]} {steps} is {batch}: leave train.batch_size out, or make the product equal"
        )
    return {**tree, "train": {**rest, "batch_size": batch, "micro_batch_size": rows}}
