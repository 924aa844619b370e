"""Run a whole comparison (several methods, several seeds), print its table and verdicts; repeat it to continue.

raycl compare jobs/configs/compare/builtin.yaml
raycl compare jobs/configs/compare/builtin.yaml --only lora joint --png matrices.png
raycl compare jobs/configs/compare/builtin.yaml --status        state of each run; starts nothing

All tables and pictures are on one page, report.html, in the comparison's folder.
"""

import argparse
import sys

from raycl.cli.commands import add_allow_env, echo, local_or_installed, note, show
from raycl.errors import ConfigError

PAGE = "report.html"
"""The page about all runs, in the comparison's folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("comparison", metavar="FILE", help="YAML with name, base, runs, seeds")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="for example base.train.epochs=1")
    parser.add_argument("--dir", default="runs", help="folder or URI for all runs (default: runs)")
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="RUN", help="just these rows, or runs of them: slm-s1"
    )
    add_allow_env(parser)
    parser.add_argument("--status", action="store_true", help="state of each run, and stop")
    parser.add_argument("--against", metavar="RUN", help="the row that verdicts compare with (default: the highest AP)")
    parser.add_argument("--png", metavar="FILE", help="write the matrices as heat maps side by side")


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Take settings that follow the rows of --only."""
    options.overrides += [word for word in options.only if "=" in word]  # numbers that follow the rows
    options.only = [word for word in options.only if "=" not in word]


def run(options: argparse.Namespace) -> int:
    """Run what is missing, print the table."""
    file = local_or_installed(options.comparison)
    from raycl.launch import console
    from raycl.operations.sweep.comparison import load_comparison, rows_of, run_comparison
    from raycl.training.workers import stopping

    console.log_to_stderr(options.quiet)
    stopping.exit_on_sigterm()
    comparison = load_comparison(file, options.overrides)
    if options.status:
        from raycl.operations.sweep.comparison import states

        states_by_name = states(comparison, options.dir, tuple(options.only))
        width = max(map(len, states_by_name))
        show(options, "\n".join(f"{name:{width}}  {state}" for name, state in states_by_name.items()), states_by_name)
        return 0
    rows = rows_of(comparison, tuple(options.only))
    if options.against and options.against not in rows:
        raise ConfigError(f"--against is '{options.against}', which is no row of this run: expected {', '.join(rows)}")
    outcome = run_comparison(comparison, options.dir, tuple(options.only))
    from raycl.operations.report.plots import matrix_figure, save_png
    from raycl.operations.report.run_comparison import compare
    from raycl.operations.report.tables import comparison_table, side_by_side
    from raycl.operations.report.verdicts import verdict_table, verdicts_of

    results = list(outcome.results.values())
    finished = {name.rpartition("-s")[0] for name in outcome.results}
    against = options.against if options.against in finished else None
    verdicts = verdicts_of(results, against)
    if options.json:
        trees = [verdict.tree for verdict in verdicts]
        show(options, "", {"results": outcome.results, "verdicts": trees, "failed": outcome.failed})
    elif results:
        echo(side_by_side(results), end="\n\n")
        echo(comparison_table(compare(results)))
        if verdicts:
            echo(f"\n{verdict_table(verdicts)}")
    if results:
        from raycl.operations.report.page.report_page import report_page
        from raycl.storage import Storage

        folder = Storage.at(options.dir).sub(comparison.name)
        folder.write(PAGE, report_page(results, comparison.name, against).encode())
        note(options, f"page {folder.uri}/{PAGE}")
    if options.png and results:
        note(options, f"picture {save_png(matrix_figure(results), options.png)}")
    for name, reason in outcome.failed.items():
        echo(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0
