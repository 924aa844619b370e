"""Measure which outputs of each layer are large for the texts of each task, in finished runs (MIGU's figure 5).

raycl probe runs/finetune runs/finetune-migu --png overlap.png
raycl probe runs --rows 50 --threshold 0.9 --csv overlap.csv
raycl probe runs --layer 'encoder.block.5.*wi'

It works with every method, with and without the modifier migu. A run's probe.json keeps the measurements.
"""

import argparse
import re
from dataclasses import asdict
from pathlib import Path

from raycl.cli.commands import note, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="run folder, or folder of runs (path or URI)")
    parser.add_argument("--rows", type=int, default=100, metavar="N", help="test rows of each task (default: 100)")
    parser.add_argument(
        "--threshold", type=float, default=0.7, metavar="T", help="share of outputs that are not large (default: 0.7)"
    )
    parser.add_argument(
        "--layer", type=regex, default="", metavar="REGEX", help="show layers whose path ends so (default: all of them)"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="key.path=value",
        help="of a run's config, such as stream.root=/data",
    )
    parser.add_argument("--again", action="store_true", help="measure runs again that were measured before")
    parser.add_argument("--png", type=Path, help="write the overlaps of tasks as heat maps side by side")
    parser.add_argument("--csv", type=Path, help="write the overlaps with full precision")


def regex(text: str) -> str:
    """Return a regular expression, and refuse what is none."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no regular expression: {error}") from error
    return text


def run(options: argparse.Namespace) -> int:
    """Measure missing runs, print the tables, write the files."""
    from raycl.metrics.run_results import FOLDER, find_results

    results = [result for root in options.runs for result in find_results(root)]
    from raycl.launch.probe import ProbeSettings, probe
    from raycl.operations.report.output_row_probe import probe_csv, probe_table, probes_of
    from raycl.operations.report.plots import probe_maps
    from raycl.storage.output import write_output

    settings = ProbeSettings(options.rows, options.threshold)
    measured = [probe(result[FOLDER], settings, options.set, options.again) for result in results]
    probes = probes_of(results, measured, options.layer)
    show(options, "\n\n".join(map(probe_table, probes)), [asdict(probe) for probe in probes])
    if options.png:
        note(options, f"wrote {probe_maps(probes, options.png)}")
    if options.csv:
        note(options, f"wrote {write_output(options.csv, probe_csv(probes).encode())}")
    return 0
