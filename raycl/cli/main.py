"""`raycl`: the entry point of the command line."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from raycl import __version__
from raycl.cli.commands import COMMANDS, echo, parser_of, run

SHELLS = ("bash", "zsh", "tcsh")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit status."""
    given = list(sys.argv[1:] if words is None else words)
    if given and given[0] in COMMANDS:
        return run(given[0], given[1:], f"raycl {given[0]}")
    options = parser().parse_args(given)
    if options.completion:
        echo(completion(options.completion), flush=True)
    else:
        parser().print_help()
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of options before a command."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    argument_parser = argparse.ArgumentParser(
        prog="raycl",
        usage="raycl [-h] [--version] [--completion SHELL] COMMAND ...",
        description="Continual learning of language models on Ray: train on tasks that arrive one after another, "
        "measure what is kept, serve the result without task ids.",
        epilog="\n".join(["commands:", *lines, "", "raycl COMMAND --help describes a command."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    argument_parser.add_argument("--version", action="version", version=f"raycl {__version__}")
    argument_parser.add_argument(
        "--completion", choices=SHELLS, metavar="SHELL", help=f"print a completion script for {', '.join(SHELLS)}"
    )
    argument_parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    return argument_parser


def completion(shell: str) -> str:
    """Return a script that completes commands, options and files in a shell."""
    import shtab

    argument_parser = argparse.ArgumentParser(prog="raycl")
    names = argument_parser.add_subparsers()
    for name, command in COMMANDS.items():
        names.add_parser(name, help=command.summary, parents=[parser_of(name, f"raycl {name}")], add_help=False)
    for action in _actions(argument_parser):
        if action.nargs != 0 and not action.choices:
            vars(action)["complete"] = shtab.FILE  # most values are paths, which no shell completes by itself here
    return str(shtab.complete(argument_parser, shell))


def _actions(argument_parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and words of a parser and of those below it."""
    for action in argument_parser._actions:
        yield action
        for below in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from _actions(below)


if __name__ == "__main__":
    sys.exit(main())
