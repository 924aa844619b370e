"""Measure against a peer and print every figure beside its target.

raycl benchmark stream                        raycl against a plain PyTorch loop, about five minutes
raycl benchmark stream --backbones minilm     just the packaged backbone
raycl benchmark mixing                        the mixture layer against backbone, PEFT and merging
raycl benchmark retrieval                     what routing costs per request
raycl benchmark growth                        what 5, 20 and 100 tasks cost SLM (or SAPT)
raycl benchmark migu                          step time with and without MIGU, masked and row-sparse
raycl benchmark step                          memory and time of a decoder's training step, packed or padded
raycl benchmark bank                          the bank against the disk, the object store against copying
raycl benchmark sweep                         a trial above the run alone, ASHA against the full grid
raycl benchmark serve                         the endpoint beside the model alone and Ray Serve alone
raycl benchmark predict                       answers for files beside the model's own batch loop
raycl benchmark evaluation --backbone DIR --data DIR  answers to test sets beside Hugging Face's generate
raycl benchmark evaluation --overlap --backbone DIR --data DIR  a stream with eval.mode=overlap beside inline
raycl benchmark startup                       how long commands take to begin
raycl benchmark memory                        what all processes of a run hold, under each engine
raycl benchmark gpu                           all that only a GPU can answer, in 8 minutes of one
raycl benchmark stream --json figures.json --check
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from raycl.cli.terminal import echo, log_to_stderr

BENCHMARKS = {
    "stream": "raycl.bench.streams.stream",
    "mixing": "raycl.bench.mixing",
    "migu": "raycl.bench.migu",
    "step": "raycl.bench.step",
    "bank": "raycl.bench.bank",
    "retrieval": "raycl.bench.retrieval",
    "growth": "raycl.bench.growth",
    "serve": "raycl.bench.serving.serving",
    "sweep": "raycl.bench.sweep",
    "predict": "raycl.bench.predict",
    "evaluation": "raycl.bench.streams.evaluation",
    "startup": "raycl.bench.startup",
    "memory": "raycl.bench.streams.memory",
    "checkpoint": "raycl.bench.streams.checkpoint",
    "gpu": "raycl.bench.gpu.suite",
}
"""Name -> module with `add_flags(parser)` and `measure(options) -> Report`; perhaps `without_measuring(options)`, which
gives a text to print where the flags ask for no figures."""


def parser(prog: str | None = None, words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command's parser.

    Args:
        words: the command line: only the benchmark that it names is imported, with its heavy libraries, for its flags.
    """
    found = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = found.add_subparsers(dest="name", required=True, metavar="NAME", help=", ".join(BENCHMARKS))
    for name, module in BENCHMARKS.items():
        flags = names.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        flags.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
        flags.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its target")
        if name in words[:1]:
            import_module(module).add_flags(flags)
    return found


def arguments(words: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    """The parsed command line."""
    return parser(prog, words).parse_args(words)


def run(options: argparse.Namespace) -> int:
    """Measure, print; 1 if `--check` finds a figure that misses its target."""
    from raycl.bench.figures import table

    log_to_stderr()
    logging.getLogger("raycl.bench").setLevel(logging.INFO)
    module = import_module(BENCHMARKS[options.name])
    text = module.without_measuring(options) if hasattr(module, "without_measuring") else None
    if text is not None:
        echo(text)
        return 0
    report = module.measure(options)
    echo(table(report))
    if options.json:
        options.json.write_text(json.dumps(report.tree(), indent=1) + "\n")
    for name in report.missed:
        echo(f"misses its target: {name}", file=sys.stderr)
    return 1 if options.check and report.missed else 0
