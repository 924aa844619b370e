"""Look at data as a run would read it: rows, labels, lengths, what would be cut, duplicates, examples.

raycl data check data/tickets                          a folder with train.*, test.*; a file; a dataset's folder
raycl data check hf://fancyzhx/ag_news                 a dataset of the Hugging Face hub
raycl data check chats.jsonl backbone.name=MODEL       conversations, and which of their tokens carry loss
raycl data check rows.csv columns.text=body columns.label=team backbone.name=google/flan-t5-small
raycl data check --config run.yaml                     all tasks of a run
raycl data check stream.name=long-C stream.root=/data  all tasks of an order
raycl data labels data/intents                         the answers of train as label set: data/intents/labels.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycl.cli.commands import add_allow_env, at_least, echo, is_override, local_or_installed, log_to_stderr, show
from raycl.errors import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from raycl.data.check import TaskCheck
    from raycl.data.settings import StreamConfig
    from raycl.training.setup.run_config import RunConfig

LABELS_FILE = "labels.json"
"""The file of a label set, next to the files of a task."""

LISTED = 12
"""The number of labels that are listed."""

SHOWN = 60
"""The number of tokens of a prompt or a target that are listed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("check", "labels"),
        help="check: describe data and list what is probably wrong; labels: write the answers of train as label set",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PATH key.path=value",
        help="folder, file or hf:// name; settings of the task (columns.text, labels, format, config, splits.test, "
        "...) and of the run (backbone.name, stream.max_source_tokens, ...)",
    )
    parser.add_argument("--config", metavar="FILE", help="check the tasks of this run's config")
    add_allow_env(parser)
    parser.add_argument(
        "--examples", type=at_least(0), default=5, metavar="N", help="examples of each task (default: 5)"
    )


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Separate paths from settings."""
    # names of files may hold "=" too
    options.paths = [word for word in options.words if not is_override(word) or Path(word).exists()]
    options.overrides = [word for word in options.words if word not in options.paths]
    named = bool(options.config) or any(word.startswith(("stream.name=", "stream.tasks=")) for word in options.words)
    if len(options.paths) > 1 or (options.paths and options.config) or not (options.paths or named):
        parser.error("expected one PATH, --config FILE, or stream.name=ORDER")
    if options.action == "labels" and not options.paths:
        parser.error("labels are those of one task: expected its PATH")


def run(options: argparse.Namespace) -> int:
    """Describe each task, or write a label set; status 1 if a run could not start with the data."""
    log_to_stderr(options)
    return _check(options) if options.action == "check" else _write_labels(options)


def _check(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    config = _config(options)
    refuses = config.stream.on_bad_row == "refuse"
    from raycl.backbone import load_codec, load_skeleton
    from raycl.data.check import check_task
    from raycl.data.stream import open_stream
    from raycl.errors import ConfigError, DataError
    from raycl.progress import counted_off
    from raycl.training.setup.checks import check_scoring
    from raycl.training.setup.lengths import with_lengths

    codec = load_codec(config.backbone, 8, 2)
    skeleton = load_skeleton(config.backbone, codec)  # the texts must fit its positions and vocabulary
    stream = open_stream(config.stream.model_copy(update={"on_bad_row": "skip"}), config.seed)
    try:
        config, stream = with_lengths(config, stream, skeleton)
    except (ConfigError, DataError):  # which the check of a task reports
        codec.max_source_tokens, codec.max_target_tokens = config.stream.token_limits
    tasks = [*stream.tasks, *stream.unseen]
    checks = []
    for task in counted_off(tasks, "checking tasks"):
        check = check_task(stream, task, codec, config.seed, options.examples)
        try:
            check_scoring(task)
        except ConfigError as error:
            check.problem = check.problem or str(error)
        if check.unusable and not check.problem and refuses:
            rows = counted(check.unusable, "row")
            check.problem = f"a run stops at {rows} that cannot be used: correct them, or set stream.on_bad_row=skip"
        if not options.json:
            _print(check, config, len(options.paths) == 1)
        checks.append(check)
    if options.json:
        show(options, "", [asdict(check) for check in checks])
    return int(any(check.problem for check in checks))


def _write_labels(options: argparse.Namespace) -> int:
    """Return the different answers of the train rows, beside them where the task is a folder."""
    from raycl.data.stream import open_stream
    from raycl.errors import DataError
    from raycl.storage.output import write_output

    config = _config(options)
    stream = open_stream(config.stream, config.seed)
    (task,) = stream.tasks
    raw = stream.source(task, "train")
    assert raw is not None, "a task that is opened has train rows"
    names = raw.open().values("references", range(raw.count))
    labels = sorted({name for label in names for name in label if name.strip()})
    (path,) = options.paths
    file = Path(path) / LABELS_FILE
    if not Path(path).is_dir():
        show(options, f"labels={json.dumps(labels, ensure_ascii=False)}", labels)
        return 0
    if file.exists():
        raise DataError(f"'{file}' is there already: expected none, remove it to write the answers of train")
    write_output(file, f"{json.dumps(labels, ensure_ascii=False, indent=1)}\n".encode())
    show(options, f"wrote {counted(len(labels), 'label')} to {file}", {"labels": labels, "file": str(file)})
    return 0


def _config(options: argparse.Namespace) -> RunConfig:
    from raycl import config as configs
    from raycl.data.settings import TaskSpec
    from raycl.training.setup.run_config import from_tree, load_config

    if not options.paths:
        file = local_or_installed(options.config) if options.config else None
        return load_config(file, options.overrides, present=True)
    (path,) = options.paths
    _check_keys(options.overrides)
    of_task = [word for word in options.overrides if word.partition("=")[0].partition(".")[0] in TaskSpec.model_fields]
    of_run = [word for word in options.overrides if word not in of_task]
    whole = configs.inline_yaml([{"name": "data", "path": path}])
    # how the path is read depends on the stream's settings
    stream = from_tree(configs.load_tree(None, [f"stream.tasks={whole}", *of_run])).stream
    tasks = configs.inline_yaml([task_at(path, of_task, stream)])
    return load_config(None, [f"stream.tasks={tasks}", *of_run], present=True)


def _check_keys(overrides: Sequence[str]) -> None:
    """Refuse a setting that neither a task nor a run has: the nearest may be of either.

    Raises:
        ConfigError: the first such setting.
    """
    from raycl.config.trainer_names import PATHS
    from raycl.data.settings import TaskSpec
    from raycl.errors import ConfigError, meant
    from raycl.training.setup.run_config import RunConfig

    known = (*TaskSpec.model_fields, *RunConfig.model_fields, *PATHS)
    for override in overrides:
        key = override.partition("=")[0].partition(".")[0].removeprefix("~")
        if key not in known:
            raise ConfigError(f"unknown config key '{key}': {meant(key, known)}")


def task_at(path: str, overrides: Sequence[str], stream: StreamConfig) -> dict[str, Any]:
    """Return the task at a path, with its settings; one file is test too, unless test rows are taken from it.

    Args:
        stream: settings of the stream that the task is part of.
    """
    from raycl import config as configs
    from raycl.data.resolve import names_splits
    from raycl.data.settings import TaskSpec, name_at

    one_split = (Path(path) / "state.json").is_file() if Path(path).is_dir() else bool(Path(path).suffix)
    given = {"name": name_at(path) or "data", **configs.load_tree(None, overrides)}
    whole = {"path": path, **given}
    has_splits = not one_split or "://" in path or "splits" in given
    if has_splits or names_splits(configs.validate(TaskSpec, whole), stream):
        return whole
    return {**({"train": path} if stream.test_fraction is not None else {"train": path, "test": path}), **given}


def _print(check: TaskCheck, config: RunConfig, alone: bool) -> None:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from raycl.text_tables import edgeless, render

    labels = f", {len(check.labels)} labels" if check.labels is not None else ""
    blocks: list[RenderableType] = [Text(f"{check.name}: {check.kind}{labels}, metric {check.metric}")]
    counted_as = ("rows", "left out", "no label", "repeated")
    table = edgeless(("split", *counted_as, "tokens: median", "95 %", "longest", "cut", "answers"))
    for name, split in check.splits.items():
        lengths = split.sources
        counts = (split.rows, split.left_out, split.unlabelled, split.repeated)
        tokens = [""] * 4
        if lengths is not None:
            tokens = [f"{lengths.median:,}", f"{lengths.p95:,}", f"{lengths.longest:,}", f"{lengths.cut:.1%}"]
        table.add_row(name, *(f"{count:,}" for count in counts), *tokens, f"{split.answers:,}")
    blocks.append(table)
    for name, split in check.splits.items():
        if split.labels and name != "dev":
            blocks.append(Text(f"labels of {name}: {_counts(split.labels)}"))
    if check.examples:
        limits = "{} and {} tokens".format(*config.stream.limits_of(check.name))
        blocks.append(Text(f"\nas {config.backbone.name} reads it, with prompt and special tokens, up to {limits}:"))
    for example in check.examples:
        has_masks = bool(example.target_tokens)
        lines = [f"row {example.row}: {example.source}"]
        lines += _tokens(example.source_tokens, " without loss" if has_masks else "")
        lines += [f"     -> {example.target}", *_tokens(example.target_tokens, " with loss")]
        blocks.append(Padding(Text("\n".join(lines)), (0, 0, 0, 2)))
    blocks += [Text(f"read: {note}") for note in check.notes]
    if check.unread:
        blocks.append(Text(f"not read: {check.unread} is read under stream.dev=file only; dev rows are those of train"))
    blocks += [Text(f"cut: {line}") for line in check.cut]
    if check.mistakes:
        mistakes = edgeless(("probably wrong", "count", "what mends it", "which"), words=(0, 2, 3))
        for mistake in check.mistakes:
            mistakes.add_row(mistake.kind, f"{mistake.count:,}", mistake.mend, mistake.which)
        blocks.append(mistakes)
    if check.problem:
        blocks.append(Text(f"error: {check.problem}"))
    elif not check.mistakes and not check.cut:
        blocks.append(Text("nothing to warn of"))
    echo(render(Group(*blocks)))


def _tokens(tokens: Sequence[str], which: str) -> list[str]:
    """Return a line of the tokens of an example; of many the first and the last ones.

    Args:
        which: words about all of them.
    """
    if not tokens:
        return []
    half = SHOWN // 2
    shown = (
        tokens if len(tokens) <= SHOWN else [*tokens[:half], f"... {len(tokens) - 2 * half} more ...", *tokens[-half:]]
    )
    return [f"     {counted(len(tokens), 'token')}{which}: {' | '.join(shown)}"]


def _counts(labels: dict[str, int]) -> str:
    listed = ", ".join(f"{label} {count:,}" for label, count in list(labels.items())[:LISTED])
    return listed if len(labels) <= LISTED else f"{listed} and {len(labels) - LISTED} more"
