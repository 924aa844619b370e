"""Answer the rows of files with a snapshot of a bank, without a server: labels or texts, as the endpoint would.

raycl predict runs/mine/bank reviews.csv --text body            one JSON object for each row on standard output
raycl predict runs/mine/bank reviews.csv --output answers.csv   one table, with the columns of the input
raycl predict runs/mine/bank@main DATA --to predictions         in parts; the same command continues after a stop
raycl predict s3://team/bank@7 s3://team/rows.parquet --to s3://team/answers device=cuda
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from raycl.cli.commands import at_least, echo, is_override, log_to_stderr, note, show

if TYPE_CHECKING:
    from raycl.bank import Bank, Snapshot
    from raycl.serve.offline.model import OfflineModel
    from raycl.serve.offline.prediction_input import Input
    from raycl.serve.settings import ServeConfig
    from raycl.storage import Storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser)
    parser.add_argument("--to", metavar="FOLDER", help="folder or URI for parts; default: standard output")
    parser.add_argument("--output", metavar="FILE", help="also one file of all rows: .csv, .jsonl or .parquet")
    parser.add_argument(
        "--workers",
        type=at_least(1),
        metavar="N",
        help="answer parts on N workers of the Ray cluster at RAY_ADDRESS, or here",
    )
    parser.add_argument("--part-rows", type=at_least(1), default=4096, help="rows of a part (default: 4096)")


def add_input(parser: argparse.ArgumentParser, words: str = "+") -> None:
    """Add arguments that name the snapshot and the rows.

    Args:
        words: how many files and settings there may be.
    """
    parser.add_argument(
        "bank", metavar="BANK[@REF]", help="branch, tag, latest, number or hash of a snapshot; default: main"
    )
    parser.add_argument(
        "words", nargs=words, metavar="FILE key.path=value", help="files or folders; settings of serving"
    )
    parser.add_argument(
        "--format",
        metavar="NAME",
        default="auto",
        help="of the files, as stream.tasks has it (default: by their suffix)",
    )
    parser.add_argument("--text", metavar="COLUMN", help="column of the text (default: text, input or sentence)")
    parser.add_argument("--depth", metavar="N", type=int, help="levels that a row of JSON may have (default: 64)")
    parser.add_argument("--row-mb", metavar="N", type=int, help="MiB that a row may have (default: 16)")
    parser.add_argument(
        "--expansion", metavar="N", type=int, help="times a Parquet file's size that its rows may take (default: 1000)"
    )
    parser.add_argument("--split", default="test", help="of a dataset (default: test)")
    parser.add_argument("--config", metavar="NAME", help="configuration of a dataset that has several")
    parser.add_argument("--task", help="task of all rows, if it is known")
    parser.add_argument("--max-tokens", type=at_least(1), help="of generated answers (default: as in training)")


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Separate files from settings."""
    options.files = [word for word in options.words if not is_override(word)]
    options.overrides = [word for word in options.words if is_override(word)]
    if not options.files:
        parser.error("no FILE: expected a file or folder with rows")
    if getattr(options, "workers", None) and not options.to:
        parser.error("--workers write parts: name their folder with --to")


def snapshot_of(options: argparse.Namespace) -> tuple[Bank, Snapshot, ServeConfig]:
    """Return what answers, and how."""
    from raycl.config import inline_yaml
    from raycl.training.records.named_bank import snapshot_at

    bank, snapshot = snapshot_at(options.bank)
    from raycl.serve.offline.model import settings_here
    from raycl.serve.settings import load_serve_config

    here = [f"{name}={inline_yaml(value)}" for name, value in settings_here(bank).items()]
    if getattr(options, "workers", None):
        here = here[:1]  # each worker reserves its threads
    return bank, snapshot, load_serve_config(None, [*here, *options.overrides])


def open_model(options: argparse.Namespace, task: str | None = None) -> OfflineModel:
    """Return the snapshot, ready to answer.

    Args:
        task: the snapshot must have it, which is checked before its backbone is read.
    """
    chosen = snapshot_of(options)
    if task is not None:
        chosen[1].require_task(task)
    note(options, f"loading snapshot {chosen[1].number} of {chosen[0].storage.uri}", sys.stderr)
    from raycl.serve.offline.model import OfflineModel

    return OfflineModel.open(*chosen)


def input_of(options: argparse.Namespace, label: tuple[str, ...] = ()) -> Input:
    """Return the rows; with a label, which `predict` does not read."""
    from raycl import config as configs
    from raycl.data.sources.fields import TEXT_NAMES, Columns
    from raycl.data.sources.formats import AUTO, reader_of
    from raycl.data.sources.reading import ReadLimits
    from raycl.serve.offline.prediction_input import Input, files_at

    given = {name: getattr(options, name) for name in ReadLimits.model_fields}
    limits = configs.validate(ReadLimits, {name: value for name, value in given.items() if value is not None})
    text = (options.text,) if options.text else TEXT_NAMES
    if options.format != AUTO:
        reader_of(options.format)
    files = files_at(options.files, options.split, options.config, limits, options.format)
    rows = Input(files, Columns(text, label, setting="--"), options.format)
    next(rows.all_rows(), None)  # a missing column is an error before a model is loaded
    return rows


def run(options: argparse.Namespace) -> int:
    """Answer all rows; a summary follows where files are written."""
    from contextlib import ExitStack
    from functools import partial
    from tempfile import TemporaryDirectory

    from raycl.errors import counted
    from raycl.serve.offline.prediction_files import answered, check_output, records_of, write_table
    from raycl.storage import Storage

    log_to_stderr(options)
    given = input_of(options)
    settings = {"task": options.task, "max_tokens": options.max_tokens}
    if options.output:
        check_output(options.output, given)
    if not (options.to or options.output):
        with open_model(options, options.task) as model:
            records = answered(model, given, given.all_rows(), **settings)
            if options.json:
                show(options, "", list(records))
            for record in records:
                echo(json.dumps(record, ensure_ascii=False))
        return 0
    with ExitStack() as stack:
        to = Storage.at(options.to or stack.enter_context(TemporaryDirectory()))
        summary = _write_parts(options, given, to, settings)
        if options.output:
            write_table(partial(records_of, to, summary["key"], summary["parts"]), options.output)
    speed = f", {summary['rows_per_s']:.0f} rows/s" if summary["rows_per_s"] else ""
    where = " and ".join(filter(None, [options.to and to.uri, options.output]))
    lines = [f"{summary['rows']:,} rows in {where}, {summary['answered_now']:,} answered now{speed}"]
    if summary["errors"]:
        lines.append(f"{counted(summary['errors'], 'row')} could not be answered: the column 'error' says why")
    for name in ("answers", "tasks"):
        lines.append(f"{name:8}" + ", ".join(f"{key} {count:,}" for key, count in summary[name].items()))
    show(options, "\n".join(lines), summary)
    return 0


def _write_parts(options: argparse.Namespace, given: Input, to: Storage, settings: dict[str, Any]) -> dict[str, Any]:
    from raycl.serve.offline.prediction_files import write_predictions

    if options.workers:
        from raycl.serve.offline.prediction_workers import write_on_workers

        bank, snapshot, config = snapshot_of(options)
        if options.task is not None:
            snapshot.require_task(options.task)
        sizes = {"workers": options.workers, "part_rows": options.part_rows}
        return write_on_workers(bank, snapshot, config, given, to, **sizes, **settings)
    with open_model(options, options.task) as model:
        return write_predictions(model, given, to, options.part_rows, **settings)
