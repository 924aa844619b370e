"""Serve a bank: one endpoint for every task, no task id, always up to date.

raycl serve --bank runs/mine                       until Ctrl-C, on http://127.0.0.1:8000
raycl serve --bank runs/mine/bank port=9000 follow.enabled=false
raycl serve --bank runs/mine activate 3            answer from snapshot 3: a rollback, or forward
raycl serve --bank runs/mine activate BRANCH       answer from the newest snapshot of a branch
raycl serve --bank runs/mine promote 4 --max-drop 1.0
"""

from __future__ import annotations

import argparse
import logging
import sys

from raycl.cli.commands import add_allow_env, echo, log_to_stderr

UNNAMED = "RUN_DIR"
"""The bank in a printed config for which none is named."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--bank", metavar="PATH", help="folder or URI of the bank, or of the run that publishes to it")
    parser.add_argument("--config", metavar="FILE", help="YAML; everything it leaves out has a default")
    add_allow_env(parser)
    parser.add_argument("--max-drop", type=float, help="points that an old task may lose (promote; default 1)")
    parser.add_argument("--print-config", action="store_true", help="show all settings, described, and stop")
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="activate SNAPSHOT, promote SNAPSHOT, or key.path=value ..."
    )


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Tell commands from settings."""
    commands = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    options.command, options.snapshot = [*commands, "", ""][:2] if commands else ["serve", ""]
    known = commands[:1] in (["activate"], ["promote"]) and len(commands) == 2
    if commands and not known:
        parser.error(
            f"'{' '.join(commands)}' is no command: expected activate SNAPSHOT, promote SNAPSHOT, or nothing, where "
            "SNAPSHOT is a number, a branch or the first digits of a hash"
        )


def run(options: argparse.Namespace) -> int:
    """Run one command; returns 1 if a candidate was refused."""
    from raycl.serve.settings import at_bank, load_serve_config

    log_to_stderr()
    logging.getLogger("raycl").setLevel(logging.INFO)
    bank = [f"bank={options.bank}"] if options.bank else []
    drop = [f"gate.max_drop={options.max_drop}"] if options.max_drop is not None else []
    given = [*bank, *drop, *options.overrides]
    if options.print_config:
        from raycl.config import load_tree
        from raycl.config.reference import commented_yaml

        named = "bank" in load_tree(options.config, given)
        echo(commented_yaml(load_serve_config(options.config, given if named else [f"bank={UNNAMED}", *given])), end="")
        return 0
    config = at_bank(load_serve_config(options.config, given))
    echo(f"reading the bank {config.bank}", file=sys.stderr, flush=True)
    from raycl.serve.deployment import endpoint

    if options.command == "activate":
        endpoint.activate(config, options.snapshot)
    elif options.command == "promote":
        result, text = endpoint.promote(config, options.snapshot)
        echo(text)
        return 0 if result.passed else 1
    else:
        endpoint.serve_forever(config)
    return 0
