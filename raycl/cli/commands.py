"""The commands of `raycl` by name, and what they share.

A command's module has `add_arguments(parser)` and `run(options)`, which returns the exit status; its docstring is the
command's help. It imports what it needs in `run`, so that `--help` does not wait for heavy libraries.
"""

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import raycl
from raycl.errors import RayclError, printable


@dataclass(frozen=True)
class Command:
    """A command: its module and one line about it.

    Attributes:
        sorts: words may stand among options, and the module has `sort_words(parser, options)`, which says what they
            are, and refuses what does not fit.
    """

    module: str
    summary: str
    sorts: bool = False


INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells."""

UNREAD = 141
"""The exit status where nobody reads the output any more, as behind `| head`; that of SIGPIPE in shells."""

COMMANDS = {
    "train": Command("raycl.cli.runs.train", "train a model on tasks that arrive one after another", True),
    "sweep": Command("raycl.cli.runs.sweep", "search settings: each trial is a run"),
    "compare": Command("raycl.cli.runs.compare", "several methods and seeds, and their table", True),
    "advise": Command("raycl.cli.runs.advise", "which method for a case, by measured figures"),
    "serve": Command("raycl.cli.banks.serve", "answer from a bank, without task ids", True),
    "bank": Command("raycl.cli.banks.bank", "look into a bank, check it, export, merge, clean up"),
    "push": Command("raycl.cli.banks.push", "send a bank's snapshot to the Hugging Face hub"),
    "pull": Command("raycl.cli.banks.pull", "fetch a bank from the Hugging Face hub"),
    "data": Command("raycl.cli.data", "look at data as a run would read it, before it trains", True),
    "predict": Command("raycl.cli.banks.predict", "answer the rows of files, without a server", True),
    "evaluate": Command("raycl.cli.banks.evaluate", "score a snapshot on files: metric, confusion, routing", True),
    "judge": Command("raycl.cli.banks.judge", "compare answers with the backbone's, by a judge's endpoint", True),
    "report": Command("raycl.cli.runs.report", "tables and pictures of finished runs"),
    "probe": Command("raycl.cli.runs.probe", "large outputs of finished models that tasks share, layer by layer"),
    "status": Command("raycl.cli.runs.status", "state and progress of a run, and the next command", True),
    "plugins": Command("raycl.cli.plugins", "what installed packages add: methods, routers, optimizers and more"),
    "clean": Command("raycl.cli.runs.clean", "remove caches and checkpoints that are not needed any more"),
    "demo": Command("raycl.cli.runs.demo", "five short tasks learned in two ways, or skills of a chat model"),
}


OBJECTS = 100_000
"""New objects between two garbage collections; imported libraries create a million, none of them garbage."""

INSTALLED = Path(raycl.__file__).parent / "files"
"""The folder of configs, comparisons and sweeps that are installed with raycl."""


def run(name: str, words: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        words: arguments; None: those of this process. prog: name for messages; None: the file that was started.
    """
    gc.set_threshold(OBJECTS)
    try:
        options = parsed(name, sys.argv[1:] if words is None else words, prog)
        with _allowed(options), _output_alone() if options.json else nullcontext():
            status = int(load(name).run(options))
        echo(end="", flush=True)
        return status
    except RayclError as error:
        say_error(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        echo("stopped by Ctrl-C: what is finished is kept; repeat the command to continue", file=sys.stderr)
        return INTERRUPTED


_OUTPUT: ContextVar[TextIO | None] = ContextVar("output", default=None)
"""Standard output while it is kept for `echo`; None: it is not."""


@contextmanager
def _output_alone() -> Iterator[None]:
    """Keep standard output for `echo`, as scripts read it: what libraries print goes to standard error.

    Transformers prints a line when parts of it are imported under WANDB_MODE=offline, for example. Without --json
    standard output stays as it is, for debuggers.
    """
    before = _OUTPUT.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _OUTPUT.reset(before)


def say_error(message: str) -> None:
    """Print an error; on a terminal its first word in red, unless NO_COLOR is set."""
    red, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"{red}error:{plain} {printable(message)}", file=sys.stderr)


def _allowed(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Let config files read the environment variables that the command allows."""
    names = vars(options).get("allow_env")
    if not names:
        return nullcontext()
    from raycl.config.sections import allowing

    return allowing(names)


def load(name: str) -> Any:
    return import_module(COMMANDS[name].module)


def parser_of(name: str, prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    module = load(name)
    command_parser = argparse.ArgumentParser(
        prog, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(command_parser)
    add_output(command_parser, False)
    return command_parser


def add_output(command_parser: argparse.ArgumentParser, default: object = argparse.SUPPRESS) -> None:
    """Add the options of every command about what it prints.

    Args:
        default: value where an option is not given; a command below another one leaves the other's as it is.
    """
    printing = command_parser.add_argument_group("output")
    printing.add_argument("--json", action="store_true", default=default, help="the result as one JSON document")
    printing.add_argument("--quiet", action="store_true", default=default, help="the result and errors alone")


def parsed(name: str, words: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    """Return the parsed command line of a command."""
    command_parser = parser_of(name, prog)
    if not COMMANDS[name].sorts:
        return command_parser.parse_args(words)
    options = command_parser.parse_intermixed_args(words)
    load(name).sort_words(command_parser, options)
    return options


def echo(text: object = "", **options: Any) -> None:
    """Print texts unchanged, except for characters that a terminal obeys; `options` are those of `print`."""
    file = options.pop("file", None) or _OUTPUT.get() or sys.stdout
    try:
        print(printable(str(text)), file=file, **options)
    except BrokenPipeError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), file.fileno())  # what is left in it is written when the process ends
        sys.exit(UNREAD)


def show(options: argparse.Namespace, text: object, tree: Any) -> None:
    """Print the result of a command: as text, or with --json as one document."""
    echo(json.dumps(tree, indent=1, ensure_ascii=False, default=str) if options.json else text, flush=True)


def note(options: argparse.Namespace, text: object, file: TextIO | None = None) -> None:
    """Print what accompanies a result, unless --quiet; with --json to standard error, which --json leaves for it.

    Args:
        file: None: standard output.
    """
    if not options.quiet:
        echo(text, file=sys.stderr if options.json else file, flush=True)


def log_to_stderr(options: argparse.Namespace) -> None:
    """Log raycl's lines and warnings of libraries, without decoration; with --quiet errors alone."""
    import logging

    from raycl.launch.console import stderr_handler

    logging.basicConfig(handlers=[stderr_handler(options.quiet)])
    logging.getLogger("raycl").setLevel(logging.INFO)


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return what reads the number of an option, and refuses smaller ones and what is no number.

    Args:
        kind: int or float.
    """

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not least <= number < math.inf:
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"'{text}': expected a {what}, {least:g} or more")
        return number

    return read


def is_override(word: str) -> bool:
    """Return whether a word of the command line is `key.path=value`, not a path or a URI with a query."""
    return "=" in word and "://" not in word.partition("=")[0]


def add_allow_env(command_parser: argparse.ArgumentParser) -> None:
    """Add the option of commands that read a config file."""
    command_parser.add_argument(
        "--allow-env",
        metavar="NAME",
        action="append",
        default=[],
        help="the config file may read this variable by ${oc.env:NAME}, besides RAYCL_DATA and RAYCL_MODELS",
    )


def local_or_installed(name: str) -> str:
    """Return `name` if there is such a file, else raycl's file of that name, such as `sweeps/seeds.yaml`.

    Raises:
        ConfigError: neither exists.
    """
    from raycl.config import require_file  # imports pydantic and OmegaConf, which --help does not need

    installed = INSTALLED / name
    takes_own = not Path(name).exists() and installed.is_file() and not Path(name).is_absolute()
    return str(installed) if takes_own else require_file(name)
