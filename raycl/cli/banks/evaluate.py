"""Score a snapshot of a bank on rows of files, which need not be in its stream: metric, confusion, routing.

With --general, score it on tasks of EleutherAI's lm-eval instead, beside the backbone without adapters.

raycl evaluate runs/mine/bank data/test.jsonl
raycl evaluate runs/mine/bank@main test.csv --text body --label category --metric macro_f1 --png confusion.png
raycl evaluate runs/mine --general arc,piqa --limit 100
"""

import argparse
import sys

from raycl.cli.banks import predict
from raycl.cli.commands import is_override, log_to_stderr, note, show

GENERAL = ("include_path", "limit", "shots", "chat_template", "allow_code")
"""Options of --general, which scores no rows of files."""

SHARED = ("bank", "words", "general", "json", "quiet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    predict.add_input(parser, words="*")
    parser.add_argument("--label", metavar="COLUMN", help="column of the answer (default: label or output)")
    parser.add_argument("--metric", help="default: that of the task with these labels, else exact_match")
    parser.add_argument("--png", metavar="FILE", help="draw the confusion of labels here")
    general = parser.add_argument_group("general ability")
    general.add_argument("--general", metavar="TASK,TASK", help="suites and tasks, as eval.general.tasks has them")
    general.add_argument(
        "--include-path", metavar="FOLDER", help="folder with task files of lm-eval, which can run code"
    )
    general.add_argument("--limit", metavar="N", type=int, help="rows of each task (default: all)")
    general.add_argument("--shots", metavar="N", type=int, help="examples in front of each text")
    general.add_argument("--chat-template", action="store_true", help="write texts as messages of the chat template")
    general.add_argument(
        "--allow-code", action="store_true", help="allow tasks that run code which the model generates"
    )


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Separate files from settings, and refuse options that would have no effect."""
    given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    if without := [name for name in given if name not in SHARED and (name in GENERAL) == (options.general is None)]:
        name = f"--{without[0].replace('_', '-')}"
        parser.error(f"{name} needs --general" if options.general is None else f"{name} is about files: leave it out")
    if options.general is None:
        predict.sort_words(parser, options)
        return
    options.overrides = list(filter(is_override, options.words))
    if len(options.overrides) < len(options.words):
        parser.error("--general takes no FILE: expected key.path=value, or rows without --general")


def run(options: argparse.Namespace) -> int:
    """Answer all rows, print the scores."""
    from dataclasses import asdict

    from raycl.data.sources.fields import LABEL_NAMES
    from raycl.metrics.per_example import check_metric

    log_to_stderr(options)
    if options.general is not None:
        return _general(options)
    if options.metric:
        check_metric(options.metric)
    given = predict.input_of(options, (options.label,) if options.label else LABEL_NAMES)
    if trained := [file.uri for file in given.files if file.name.startswith("train.")]:
        note(options, f"scoring {trained[0]} too: name the file of test rows to score them alone", sys.stderr)
    with predict.open_model(options, options.task) as model:
        from raycl.operations.report.evaluation_report import confusion_png, evaluation_table
        from raycl.serve.offline.evaluation import evaluate_rows

        evaluation = evaluate_rows(model, given, options.metric, task=options.task, max_tokens=options.max_tokens)
    tree = asdict(evaluation)
    show(options, evaluation_table(tree), tree)
    if options.png:
        note(options, f"wrote {confusion_png(tree, options.png)}")
    return 0


def _general(options: argparse.Namespace) -> int:
    """Measure general ability, print it beside that of the backbone."""
    from dataclasses import asdict

    from raycl import config as configs
    from raycl.metrics.settings import GeneralConfig

    given = {name: getattr(options, name) for name in GENERAL}
    settings = configs.validate(GeneralConfig, {"tasks": options.general.split(","), **given})
    with predict.open_model(options) as model:
        from raycl.operations.report.evaluation_report import ability_table

        ends = {"before": model.general(settings, is_bare=True), "after": model.general(settings)}
    tree = {end: {name: asdict(score) for name, score in scores.items()} for end, scores in ends.items()}
    show(options, ability_table(tree), tree)
    return 0
