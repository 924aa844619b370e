"""Measure against a peer and print every figure beside its target.

python jobs/benchmark.py stream                        raycl against a plain PyTorch loop, about five minutes
python jobs/benchmark.py stream --backbones minilm     just the packaged backbone
python jobs/benchmark.py mixing                        the mixture layer against backbone, PEFT and merging
python jobs/benchmark.py retrieval                     what routing costs per request
python jobs/benchmark.py growth                        what 5, 20 and 100 tasks cost SLM (or SAPT)
python jobs/benchmark.py migu                          step time with and without MIGU, masked and row-sparse
python jobs/benchmark.py step                          memory and time of a decoder's training step, packed or padded
python jobs/benchmark.py bank                          the bank against the disk, the object store against copying
python jobs/benchmark.py parallel                      tasks at the same time, here and on a simulated cluster
python jobs/benchmark.py sweep                         a trial above the run alone, ASHA against the full grid
python jobs/benchmark.py serve                         the endpoint beside the model alone and Ray Serve alone
python jobs/benchmark.py decode --backbone DIR         tokens of one and of many streams beside Hugging Face's generate
python jobs/benchmark.py predict                       answers for files beside the model's own batch loop
python jobs/benchmark.py evaluation --backbone DIR --data DIR  answers to test sets beside Hugging Face's generate
python jobs/benchmark.py startup                       how long commands and runs take to begin, twelve short runs
python jobs/benchmark.py memory                        what all processes of a run hold, under each engine
python jobs/benchmark.py checkpoint                    host memory that writing a checkpoint takes
python jobs/benchmark.py gpu                           all that only a GPU can answer, in 10 minutes of one
python jobs/benchmark.py stream --json figures.json --check
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from raycl.cli.commands import echo, say_error
from raycl.errors import RayclError
from raycl.launch.console import stderr_handler
from raycl.storage.output import write_output

BENCHMARKS = {
    "stream": "benchmarks.streams.stream",
    "mixing": "benchmarks.mixing",
    "migu": "benchmarks.migu",
    "step": "benchmarks.step",
    "bank": "benchmarks.bank",
    "retrieval": "benchmarks.serving.retrieval",
    "growth": "benchmarks.growth",
    "serve": "benchmarks.serving.serving",
    "parallel": "benchmarks.parallel",
    "sweep": "benchmarks.sweep",
    "predict": "benchmarks.serving.predict",
    "decode": "benchmarks.serving.decode",
    "evaluation": "benchmarks.streams.evaluation",
    "startup": "benchmarks.startup",
    "memory": "benchmarks.streams.memory",
    "checkpoint": "benchmarks.streams.checkpoint",
    "gpu": "benchmarks.gpu.suite",
}
"""Name -> module with `add_flags(parser)` and `measure(options) -> Report`; perhaps `without_measuring(options)`, which
gives a text to print where the flags ask for no figures."""


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the command's parser.

    Args:
        words: the command line: only the benchmark that it names is imported, with its heavy libraries, for its flags.
    """
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = command.add_subparsers(dest="name", required=True, metavar="NAME", help=", ".join(BENCHMARKS))
    for name, module in BENCHMARKS.items():
        flags = names.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        flags.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
        flags.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its target")
        if name in words[:1]:
            import_module(module).add_flags(flags)
    return command


def main(words: Sequence[str] | None = None) -> int:
    """Measure what the command line names; returns the exit status."""
    words = sys.argv[1:] if words is None else words
    try:
        return run(parser(words).parse_args(words))
    except RayclError as error:
        say_error(str(error))
        return error.exit_status


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 1 if `--check` finds a figure that misses its target."""
    from benchmarks.figures import table

    logging.basicConfig(handlers=[stderr_handler()])
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    module = import_module(BENCHMARKS[options.name])
    text = module.without_measuring(options) if hasattr(module, "without_measuring") else None
    if text is not None:
        echo(text)
        return 0
    if options.json:
        write_output(options.json, b"", appends=True)  # what cannot be written is said before minutes of measuring
    report = module.measure(options)
    echo(table(report))
    if options.json:
        write_output(options.json, f"{json.dumps(report.tree(), indent=1)}\n".encode())
    for name in report.missed:
        echo(f"misses its target: {name}", file=sys.stderr)
    return 1 if options.check and report.missed else 0
