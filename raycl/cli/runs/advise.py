"""Recommend a method for a case, with the measured figures behind it and the command to type; starts nothing.

raycl advise                                              the default backbone, nothing else known
raycl advise data/tickets data/mail --no-kept-data        how many tasks and rows is read from the data
raycl advise --kind decoder --task-known --serve
raycl advise --backbone google-t5/t5-large --memory 24 --rows 2000 --json
"""

import argparse
import math

from raycl.cli import commands
from raycl.cli.commands import show

UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def size_of(text: str) -> float:
    """Return the number of parameters in `7B`, `135M` or `7e9`."""
    unit = UNITS.get(text[-1:].upper(), 1.0)
    try:
        size = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of parameters: expected one such as 7B, 135M or 7e9")
    return size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", nargs="*", metavar="DATA", help="a folder or file for each task, or YAML as in stream.tasks"
    )
    parser.add_argument("--tasks", type=int, metavar="N", help="tasks in all (default: those of DATA)")
    parser.add_argument("--rows", type=int, metavar="N", help="training rows of a task (default: the median of DATA)")
    parser.add_argument("--backbone", metavar="NAME", help="model folder or hub id, whose config.json is here")
    parser.add_argument("--kind", metavar="encoder|encoder-decoder|decoder", help="of the backbone")
    parser.add_argument("--size", type=size_of, metavar="PARAMETERS", help="of the backbone, such as 7B, 135M or 7e9")
    parser.add_argument("--no-kept-data", action="store_true", help="no row of an earlier task may be stored")
    parser.add_argument("--task-known", action="store_true", help="a text's task is known when it is answered")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of the device that trains")
    parser.add_argument("--serve", action="store_true", help="an endpoint is to answer from what was learned")


def run(options: argparse.Namespace) -> int:
    from raycl.errors import ConfigError
    from raycl.operations.advise.advice import Case, advise, read_study

    kind, size = options.kind, options.size
    for name in ("tasks", "rows", "memory"):
        if (given := getattr(options, name)) is not None and not 0 < given < math.inf:
            raise ConfigError(f"--{name} is {given:g}: expected a number above 0")
    if options.memory is not None and not (options.backbone or size):
        raise ConfigError(
            "--memory is compared with the backbone's weights: name its --size, such as 7B, or --backbone"
        )
    words = []
    if options.backbone:
        from raycl.backbone import BackboneConfig
        from raycl.backbone.architecture import architecture

        backbone = architecture(BackboneConfig(name=options.backbone), 128, 16)
        kind, size = kind or backbone.codec.kind, size or sum(each.numel() for each in backbone.parameters())
        words.append(f"backbone.name={options.backbone}")
    tasks, rows = options.tasks, options.rows
    if options.data:
        counts = _rows(options.data)
        tasks, rows = tasks or len(counts), rows or sorted(counts)[len(counts) // 2]
        words.append(f"stream.tasks={_specs(options.data)}")
    case = Case(
        tasks, rows, size, not options.no_kept_data, options.task_known, options.memory, options.serve, tuple(words)
    )
    advice = advise(read_study(commands.INSTALLED, kind), case)
    show(options, advice, advice.tree)
    return 0


def _specs(paths: list[str]) -> str:
    from raycl import config as configs
    from raycl.cli.data import task_at
    from raycl.data.settings import StreamConfig
    from raycl.launch.prepared_run import task_of

    stream = StreamConfig()
    return configs.inline_yaml([task_of(path) if path.startswith("{") else task_at(path, [], stream) for path in paths])


def _rows(paths: list[str]) -> list[int]:
    from raycl.data.stream import open_stream
    from raycl.training.setup.run_config import load_config

    usable = "stream.on_bad_row=skip"  # rows are counted, and a run says which cannot be used
    config = load_config(None, [f"stream.tasks={_specs(paths)}", usable], present=True)
    stream = open_stream(config.stream, config.seed)
    sources = [stream.source(task, "train") for task in stream.tasks]
    return [0 if source is None else source.count for source in sources]
