"""Search the settings of a stream: every trial is one whole run, several at a time; then the table and the best config.

raycl sweep sweeps/migu_threshold.yaml             on this machine, or on the cluster it runs on
raycl sweep sweeps/migu_threshold.yaml --set samples=4 base.train.epochs=1
raycl sweep sweeps/migu_threshold.yaml --resume    continue it
raycl train runs/migu-threshold/best.yaml          the best trial, alone: the same numbers
"""

import argparse
import sys

from raycl.cli.commands import add_allow_env, echo, local_or_installed, note, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="FILE", help="YAML with name, base, space, metric, search, scheduler, ...")
    parser.add_argument("--dir", help="folder or URI for sweeps (default: as output.dir of a run)")
    parser.add_argument("--resume", action="store_true", help="continue the sweep; failed trials are tried again")
    add_allow_env(parser)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="key.path=value")


def run(options: argparse.Namespace) -> int:
    """Run the trials, sum up."""
    file = local_or_installed(options.sweep)
    from raycl.launch import console
    from raycl.operations.sweep.definition.sweep_config import load_sweep
    from raycl.training.setup import run_config
    from raycl.training.workers import stopping

    console.log_to_stderr(options.quiet)
    stopping.exit_on_sigterm()
    directory = options.dir or run_config.default_directory()
    sweep = load_sweep(file, options.set)
    from raycl.operations.sweep.drive import run_sweep
    from raycl.operations.sweep.outcome import write_outcome

    outcome = run_sweep(sweep, directory, options.resume)
    text, files = write_outcome(outcome, directory)
    show(options, text, outcome.tree())
    for file in files:
        note(options, f"wrote {file}")
    for number, reason in outcome.unscored.items():
        echo(f"no score: trial {number + 1}: {reason}", file=sys.stderr)
    for number, reason in outcome.failed.items():
        echo(f"failed: trial {number + 1}: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0
