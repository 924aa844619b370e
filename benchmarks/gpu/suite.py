"""The suite: parts in order of value, each within its share of the time, every figure kept as soon as it is known."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figure, Report, cells, machine
from benchmarks.gpu.report import markdown
from benchmarks.gpu.setup import Case, Setup
from raycl.errors import ConfigError, RayclError, WrongResultError
from raycl.storage.unfinished import finished_beside

log = logging.getLogger(__name__)

FAILURES = (
    *(RayclError, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError, queue.Empty),
)
"""Errors that end a case and not the suite."""

LOST = "the device is lost: what is missing is measured by a new process (--only NAME)"


@dataclass(frozen=True)
class Part:
    """A part of the suite.

    Attributes:
        share: share of the suite's time without the reserve, in percent.
        timed: its targets are about times, which mean nothing at tiny sizes.
        least_s: seconds that its smallest run takes on a GPU; with less left of the suite's time, it is left out.
    """

    name: str
    share: int
    about: str
    timed: bool = True
    least_s: int = 5

    def cases(self, setup: Setup) -> list[Case]:
        """Return what it measures, in order of value; its module is imported when it is reached."""
        module = importlib.import_module(f"benchmarks.gpu.parts.{self.name}")
        gc.freeze()  # garbage is collected after every case: what the libraries made on import is none
        result: Iterable[Case] = module.cases(setup)
        return list(result)


PARTS = (
    Part("correctness", 5, "kernels, mixtures, decoding and routing give the CPU's results", False),
    Part("streams", 16, "training, resume and evaluation give the CPU's results, for every family of methods", False),
    Part("limits", 3, "the machine's own limits: bfloat16 matrix product, copy"),
    Part("linears", 8, "the mixture layer at the linears of a 7B and a 13B LLaMA, over the bare linear"),
    Part("decoding", 13, "prefill and decoding of a 7B LLaMA with mixtures, over the bare model and the copy rate"),
    Part("masking", 10, "MIGU's step at T5 large and a 1B LLaMA: plain, masked, row-sparse"),
    Part("steps", 11, "a training step with LoRA, SLM and SAPT at 1B and 7B: tokens per second, MFU, memory"),
    Part("serving", 6, "continuous batching: 64 requests, 16 mixtures, over the same without adapters"),
    Part("routing", 3, "routing among 10,000 tasks"),
    Part("large", 13, "a 7B LLaMA's step packed, under FSDP2, in 8 and 4 bits, and its loading over the disk's rate"),
)
"""The parts in order of value; those whose single runs are long come last."""

RESERVE = 0.1
"""This share of the suite's time is kept free, since cases are not cut short and may exceed their part's time."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Everything that can be chosen."""
    names = [part.name for part in PARTS]
    parser.add_argument("--minutes", type=float, default=10.0, help="the parts share them, but for a tenth")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: results are checked, times mean nothing")
    parser.add_argument("--list", action="store_true", help="print the parts with their minutes, and measure nothing")
    parser.add_argument(
        "--report", metavar="FILE", type=Path, help="write the figures of --json (or FILE's own .json) as Markdown"
    )


def without_measuring(options: argparse.Namespace) -> str | None:
    """Return the text of `--list` and `--report`; None: figures are wanted.

    Raises:
        ConfigError: the figures to report are no JSON of this benchmark.
    """
    if options.list:
        return _listed(options)
    if options.report:
        source = options.json or options.report.with_suffix(".json")
        options.report.write_text(markdown(_read(source)), encoding="utf-8")
        return f"{options.report}: written from {source}"
    return None


def measure(options: argparse.Namespace, parts: Sequence[Part] = PARTS) -> Report:
    """Run the chosen ones of `parts`.

    Raises:
        ConfigError: the device does not exist.
    """
    setup = Setup(_device(options), options.tiny)
    progress = Progress(options, setup, os.getloadavg()[0])
    chosen = [part for part in parts if part.name in options.only]
    ends = time.monotonic() + 60 * options.minutes
    for number, part in enumerate(chosen):
        left = ends - time.monotonic()
        if left < part.least_s and not setup.tiny:
            _note(setup, f"{part.name}: left out, since {_left(left)} and it takes {part.least_s}; give more --minutes")
            continue
        shared = max(0.0, left - RESERVE * 60 * options.minutes)
        run_part(part, setup, shared * part.share / sum(later.share for later in chosen[number:]), progress.add)
        if not setup.is_alive():
            _note(setup, LOST)
            break
    progress.finished = True
    progress.keep()
    return progress.report()


@dataclass
class Progress:
    """The figures so far, which are logged and written at once."""

    options: argparse.Namespace
    setup: Setup
    load_before: float
    figures: list[Figure] = field(default_factory=list)
    finished: bool = False

    def add(self, figure: Figure) -> None:
        """Log and write one more."""
        self.figures.append(figure)
        value, target, kept, detail = cells(figure)
        log.info("%s", "  ".join(filter(None, (f"{figure.name}: {value}", target, kept, detail and f"({detail})"))))
        self.keep()

    def report(self) -> Report:
        """Return all of them."""
        settings = {key: getattr(self.options, key) for key in ("minutes", "only", "device", "tiny")}
        settings["finished"] = self.finished
        where = {"measured on": _device_name(self.setup.device), **machine(self.load_before)}
        return Report("gpu", settings, tuple(self.figures), where, tuple(self.setup.notes))

    def keep(self) -> None:
        """Write what is known, whole or not at all."""
        if self.options.json:
            path = Path(self.options.json)
            text = json.dumps(self.report().tree(), indent=1) + "\n"
            with finished_beside(path, [text.encode()]) as written:
                written.replace(path)


def run_part(part: Part, setup: Setup, seconds: float, add: Callable[[Figure], None]) -> None:
    """Run a part's cases, one after another, until its time is used up; what is not reached is noted."""
    began = time.monotonic()
    log.info("[%s] %s: %.1f minutes", part.name, part.about, seconds / 60)
    try:
        cases = part.cases(setup)
    except FAILURES as error:
        add(_failure(part.name, error))
        return
    try:
        _run_cases(part, cases, setup, began + seconds, add)
    finally:
        setup.closing.close()
        del cases
        setup.free()


def _run_cases(part: Part, cases: list[Case], setup: Setup, ends: float, add: Callable[[Figure], None]) -> None:
    unreached: list[str] = []
    for number, case in enumerate(cases):
        left = ends - time.monotonic()
        if left <= 0 and number:
            unreached.append(case.name)
            continue
        missing = [package for package in case.needs if find_spec(package) is None]
        if missing:
            _note(setup, f"{part.name}, {case.name}: left out, since {', '.join(missing)} is not installed")
            continue
        _run_case(part, case, setup, max(left, 0.0) / (len(cases) - number), add)
        setup.free()
        if not setup.is_alive():
            return
    if unreached:
        _note(setup, f"{part.name}: not reached within its time: {', '.join(unreached)}; give more --minutes")


def _run_case(part: Part, case: Case, setup: Setup, seconds: float, add: Callable[[Figure], None]) -> None:
    try:
        for figure in case.figures(seconds):
            target = None if setup.tiny and part.timed else figure.target
            add(replace(figure, name=f"{part.name}, {figure.name}", target=target))
    except torch.OutOfMemoryError as error:
        _note(setup, f"{part.name}, {case.name}: out of memory, left out ({str(error).splitlines()[0]})")
    except FAILURES as error:
        add(_failure(f"{part.name}, {case.name}", error))


def _failure(what: str, error: Exception) -> Figure:
    """Return counts as a figure that falls short."""
    if not isinstance(error, WrongResultError):
        log.error("%s failed", what, exc_info=error)
    words = " ".join(str(error).split())[:400]
    return Figure(f"{what}: failures", 1.0, "", 0.0, "<=", f"{type(error).__name__}: {words}")


def _note(setup: Setup, words: str) -> None:
    log.info("note: %s", words)
    setup.notes.append(words)


def _left(seconds: float) -> str:
    return f"{seconds:.0f} s of the time are left" if seconds > 0 else "no time is left"


def _listed(options: argparse.Namespace) -> str:
    rows = [(part.name, _minutes(part, options), part.about) for part in PARTS]
    rows.append(("reserve", RESERVE * options.minutes, "for cases that take longer than their part's time"))
    return "\n".join(f"{name:12} {minutes:4.1f} minutes   {about}" for name, minutes, about in rows)


def _minutes(part: Part, options: argparse.Namespace) -> float:
    """Expected, of the chosen parts."""
    chosen: Sequence[Part] = [item for item in PARTS if item.name in options.only]
    whole = (1 - RESERVE) * float(options.minutes)
    return whole * part.share / sum(item.share for item in chosen) if part in chosen else 0.0


def _device(options: argparse.Namespace) -> torch.device:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "benchmark gpu: --device is cuda and torch finds no GPU here: run it on a machine with one, or add "
            "--tiny --device cpu to check every part without times"
        )
    if device.type != "cuda" and not options.tiny:
        raise ConfigError(f"benchmark gpu: --device is {device}, where a 7B model takes hours: add --tiny")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # as tensors have it
        torch.cuda.set_device(device)
    return device


def _device_name(device: torch.device) -> str:
    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _read(source: Path) -> dict[str, Any] | None:
    """Figures, or None where there are none yet."""
    if not source.is_file():
        return None
    try:
        tree: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
        assert tree["name"] == "gpu" and isinstance(tree["figures"], list)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(f"'{source}' is no JSON of `benchmark gpu`: name the file that --json wrote") from error
    return tree if tree["figures"] else None
