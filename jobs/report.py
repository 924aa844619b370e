"""Print matrices, routing, attention, kept rows and a comparison of finished runs; on request as pictures and CSV.

    python jobs/report.py runs/sapt runs/lora
    python jobs/report.py runs --png matrices.png --csv comparison.csv
    python jobs/report.py runs/slm --router-png router.png
    python jobs/report.py runs/sapt --attention-png attention.png

Why it exists: the command-line door to `raycl.report`.
What it does not know: how tables and pictures are made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from raycl.errors import RayclError
from raycl.report.attention import has_attention
from raycl.report.attention_plots import attention_maps
from raycl.report.compare import to_csv
from raycl.report.plots import heatmaps
from raycl.report.results import find_results
from raycl.report.router_plots import router_maps
from raycl.report.routing import has_routing
from raycl.report.tables import comparison_table, routing_comparison, tables_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Report on the runs named on the command line; the exit status."""
    options = _parse(arguments)
    try:
        results = [result for root in options.runs for result in find_results(root)]
        routed = [result for result in results if has_routing(result)]
        for result in results:
            for table in tables_of(result):
                print(table, end="\n\n")
        if len(routed) > 1:
            print(routing_comparison(routed), end="\n\n")
        print(comparison_table(results))
        if options.png:
            print(f"wrote {heatmaps(results, options.png)}")
        if options.router_png:
            print(f"wrote {router_maps(routed or results, options.router_png)}")
        if options.attention_png:
            attending = [result for result in results if has_attention(result)]
            print(f"wrote {attention_maps(attending or results, options.attention_png)}")
        if options.csv:
            _write(options.csv, to_csv(results))
    except RayclError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tables and pictures of finished runs.")
    parser.add_argument("runs", nargs="+", help="run folder, folder of runs, or results.json (path or URI)")
    parser.add_argument("--png", type=Path, help="write the matrices as heat maps side by side")
    parser.add_argument(
        "--router-png", type=Path, help="draw the routers of the runs that have one: keys, t-SNE, tasks found"
    )
    parser.add_argument(
        "--attention-png", type=Path, help="draw the adapters' weights for each task's texts in runs of sapt"
    )
    parser.add_argument("--csv", type=Path, help="write the comparison with full precision")
    return parser.parse_args(arguments)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
