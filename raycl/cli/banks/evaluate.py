"""Score a snapshot of a bank on rows of files, which need not be in its stream: metric, confusion, routing.

raycl evaluate runs/mine/bank data/test.jsonl
raycl evaluate runs/mine/bank@main test.csv --text body --label category --metric macro_f1 --png confusion.png
"""

import argparse

from raycl.cli.banks import predict
from raycl.cli.commands import log_to_stderr, note, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    predict.add_input(parser)
    parser.add_argument("--label", metavar="COLUMN", help="column of the answer (default: label or output)")
    parser.add_argument("--metric", help="default: that of the task with these labels, else exact_match")
    parser.add_argument("--png", metavar="FILE", help="draw the confusion of labels here")


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Tell files from settings."""
    predict.sort_words(parser, options)


def run(options: argparse.Namespace) -> int:
    """Answer all rows, print the scores."""
    from dataclasses import asdict

    from raycl.data.sources.fields import LABEL_NAMES

    log_to_stderr(options)
    given = predict.input_of(options, (options.label,) if options.label else LABEL_NAMES)
    with predict.open_model(options) as model:
        from raycl.operations.report.evaluation_report import confusion_png, evaluation_table
        from raycl.serve.offline.evaluation import evaluate_rows

        evaluation = evaluate_rows(model, given, options.metric, task=options.task, max_tokens=options.max_tokens)
    tree = asdict(evaluation)
    show(options, evaluation_table(tree), tree)
    if options.png:
        note(options, f"wrote {confusion_png(tree, options.png)}")
    return 0
