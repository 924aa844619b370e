"""The commands of `raycl` by name.

A command's module has `parser(prog)`, `arguments(words, prog)` and `run(options)`, which returns the exit status. It
imports what it needs in `run`, so that `--help` does not wait for heavy libraries.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from raycl.cli.terminal import echo
from raycl.errors import RayclError


@dataclass(frozen=True)
class Command:
    """A command: its module and one line about it."""

    module: str
    summary: str


INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells."""

COMMANDS = {
    "train": Command("raycl.cli.runs.train", "train a model on tasks that arrive one after another"),
    "sweep": Command("raycl.cli.runs.sweep", "search settings: each trial is a run"),
    "compare": Command("raycl.cli.runs.compare", "several methods and seeds, and their table"),
    "serve": Command("raycl.cli.banks.serve", "answer from a bank, without task ids"),
    "bank": Command("raycl.cli.banks.bank", "look into a bank, check it, export, merge, clean up"),
    "data": Command("raycl.cli.data", "look at data as a run would read it, before it trains"),
    "predict": Command("raycl.cli.banks.predict", "answer the rows of files, without a server"),
    "evaluate": Command("raycl.cli.banks.evaluate", "score a snapshot on files: metric, confusion, routing"),
    "report": Command("raycl.cli.runs.report", "tables and pictures of finished runs"),
    "probe": Command("raycl.cli.runs.probe", "large outputs of finished models that tasks share, layer by layer"),
    "status": Command("raycl.cli.runs.status", "state and progress of a run, and the next command"),
    "plugins": Command("raycl.cli.plugins", "what installed packages add: methods, routers, optimizers and more"),
    "clean": Command("raycl.cli.runs.clean", "remove caches and checkpoints that are not needed any more"),
    "demo": Command("raycl.cli.runs.demo", "learn five short tasks in two ways: one forgets, one does not"),
}


OBJECTS = 100_000
"""New objects between two garbage collections; imported libraries create a million, none of them garbage."""


def run(name: str, words: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        words: arguments; None: those of this process. prog: name for messages; None: the file that was started.
    """
    gc.set_threshold(OBJECTS)
    try:
        module = load(name)
        options = module.arguments(sys.argv[1:] if words is None else words, prog)
        with _allowed(options):
            return int(module.run(options))
    except RayclError as error:
        echo(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        echo("stopped by Ctrl-C: what is finished is kept; repeat the command to continue", file=sys.stderr)
        return INTERRUPTED


def _allowed(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Let config files read the environment variables that the command allows."""
    names = vars(options).get("allow_env")
    if not names:
        return nullcontext()
    from raycl.config.environment import allowing

    return allowing(names)


def load(name: str) -> Any:
    """Return the module of a command."""
    return import_module(COMMANDS[name].module)
