"""Measure against a peer and print every figure beside its target.

python jobs/benchmark.py stream                        raycl against a plain PyTorch loop, about five minutes
python jobs/benchmark.py stream --backbones minilm     just the packaged backbone
python jobs/benchmark.py mixing                        the mixture layer against backbone, PEFT and merging
python jobs/benchmark.py retrieval                     what routing costs per request
python jobs/benchmark.py growth                        what 5, 20 and 100 tasks cost SLM (or SAPT)
python jobs/benchmark.py migu                          step time with and without MIGU, masked and row-sparse
python jobs/benchmark.py bank                          the bank against the disk, the object store against copying
python jobs/benchmark.py sweep                         a trial above the run alone, ASHA against the full grid
python jobs/benchmark.py serve                         the endpoint beside the model alone and Ray Serve alone
python jobs/benchmark.py gpu                           all that only a GPU can answer, in 8 minutes of one
python jobs/benchmark.py stream --json figures.json --check
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from pathlib import Path

from raycl.bench.figures import table
from raycl.errors import RayclError

BENCHMARKS = {
    "stream": "raycl.bench.streams.stream",
    "mixing": "raycl.bench.mixing",
    "migu": "raycl.bench.migu",
    "bank": "raycl.bench.bank",
    "retrieval": "raycl.bench.retrieval",
    "growth": "raycl.bench.growth",
    "serve": "raycl.bench.serving.serving",
    "sweep": "raycl.bench.sweep",
    "gpu": "raycl.bench.gpu.suite",
}
"""Name -> module with `add_flags(parser)` and `measure(options) -> Report`; perhaps `without_measuring(options)`, which
gives a text to print where the flags ask for no figures."""


def arguments() -> argparse.Namespace:
    """The command line; only the named benchmark is imported, since it brings its heavy libraries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME", help=", ".join(BENCHMARKS))
    for name, module in BENCHMARKS.items():
        flags = names.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        flags.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
        flags.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its target")
        if name in sys.argv[1:2]:
            importlib.import_module(module).add_flags(flags)
    return parser.parse_args()


def main() -> int:
    """Parse, measure, print."""
    options = arguments()
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("raycl.bench").setLevel(logging.INFO)
    try:
        module = importlib.import_module(BENCHMARKS[options.name])
        text = module.without_measuring(options) if hasattr(module, "without_measuring") else None
        if text is not None:
            print(text)
            return 0
        report = module.measure(options)
    except RayclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report.tree(), indent=1) + "\n")
    for name in report.missed:
        print(f"misses its target: {name}", file=sys.stderr)
    return 1 if options.check and report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
