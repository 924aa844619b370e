"""Run a whole comparison (several methods, several seeds) and print its table; repeat the command to continue.

python jobs/compare.py jobs/configs/compare/builtin.yaml
python jobs/compare.py jobs/configs/compare/builtin.yaml --only lora joint --png matrices.png
"""

from __future__ import annotations

import argparse
import sys

from raycl.errors import RayclError
from raycl.launch import console, termination
from raycl.report.plots import heatmaps
from raycl.report.tables import comparison_table, side_by_side
from raycl.sweep.comparison import load_comparison, run_comparison


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", metavar="FILE", help="YAML with name, base, runs, seeds")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="for example base.train.epochs=1")
    parser.add_argument("--dir", default="runs", help="folder or URI for all runs (default: runs)")
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN", help="just these rows")
    parser.add_argument("--png", metavar="FILE", help="write the matrices as heat maps side by side")
    return parser.parse_intermixed_args()


def main() -> int:
    """Parse, run, print."""
    options = arguments()
    console.log_to_stderr()
    termination.exit_on_sigterm()
    try:
        comparison = load_comparison(options.comparison, options.overrides)
        outcome = run_comparison(comparison, options.dir, tuple(options.only))
        results = list(outcome.results.values())
        if results:
            print(side_by_side(results), end="\n\n")
            print(comparison_table(results))
        if options.png and results:
            print(f"picture {heatmaps(results, options.png)}")
    except RayclError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    for name, reason in outcome.failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
