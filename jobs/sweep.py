"""Search the settings of a stream: every trial is one whole run, several at a time; then the table and the best config.

python jobs/sweep.py sweeps/migu_threshold.yaml                       on this machine, or on the cluster it runs on
python jobs/sweep.py sweeps/migu_threshold.yaml --set samples=4 base.train.epochs=1
python jobs/sweep.py sweeps/migu_threshold.yaml --resume              continue it
python jobs/train_stream.py runs/migu-threshold/best.yaml             the best trial, alone: the same numbers
"""

from __future__ import annotations

import argparse
import sys

from raycl.errors import RayclError
from raycl.launch import console, termination
from raycl.run import config as run_config
from raycl.sweep.config import load_sweep
from raycl.sweep.drive import run_sweep
from raycl.sweep.write import write_outcome


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", metavar="FILE", help="YAML with name, base, space, metric, search, scheduler, ...")
    parser.add_argument("--dir", help="folder or URI for sweeps (default: as output.dir of a run)")
    parser.add_argument("--resume", action="store_true", help="continue the sweep; failed trials are tried again")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="key.path=value")
    return parser.parse_args()


def main() -> int:
    """Parse, run, sum up."""
    options = arguments()
    console.log_to_stderr()
    termination.exit_on_sigterm()
    directory = options.dir or run_config.default_directory()
    try:
        sweep = load_sweep(options.sweep, options.set)
        outcome = run_sweep(sweep, directory, options.resume)
        text, files = write_outcome(outcome, directory)
    except RayclError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(text)
    for file in files:
        print(f"wrote {file}")
    for number, reason in outcome.failed.items():
        print(f"failed: trial {number + 1}: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
