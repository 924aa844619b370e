"""Serve what a bank holds: one endpoint for every task, no task id, always up to date.

raycl serve --bank runs/mine/bank                       until Ctrl-C, on http://127.0.0.1:8000
raycl serve --bank runs/mine/bank port=9000 follow.enabled=false
raycl serve --bank runs/mine/bank activate 3            answer from snapshot 3: a rollback, or forward
raycl serve --bank runs/mine/bank promote 4 --max-drop 1.0
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command's parser."""
    found = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--bank", metavar="PATH", help="folder or URI of the bank")
    found.add_argument("--config", metavar="FILE", help="YAML; everything it leaves out has a default")
    found.add_argument("--max-drop", type=float, help="points that an old task may lose (promote; default 1)")
    found.add_argument("--print-config", action="store_true", help="show all settings, described, and stop")
    found.add_argument("words", nargs="*", metavar="WORD", help="activate N, promote N, or key.path=value ...")
    return found


def arguments(words: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    """The parsed command line."""
    found = parser(prog)
    options = found.parse_intermixed_args(words)
    commands = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    options.command, options.number = [*commands, "", ""][:2] if commands else ["serve", ""]
    known = options.command == "serve" or (
        options.command in ("activate", "promote") and options.number.isdecimal() and len(commands) == 2
    )
    if not known:
        found.error(f"'{' '.join(commands)}' is no command: expected activate NUMBER, promote NUMBER, or nothing")
    return options


def run(options: argparse.Namespace) -> int:
    """Run one command; 1 if a candidate was refused."""
    from raycl.config.reference import commented_yaml
    from raycl.serve.deployment import endpoint
    from raycl.serve.settings import load_serve_config

    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("raycl").setLevel(logging.INFO)
    bank = [f"bank={options.bank}"] if options.bank else []
    drop = [f"gate.max_drop={options.max_drop}"] if options.max_drop is not None else []
    config = load_serve_config(options.config, [*bank, *drop, *options.overrides])
    if options.print_config:
        print(commented_yaml(config), end="")
    elif options.command == "activate":
        endpoint.activate(config, int(options.number))
    elif options.command == "promote":
        result, text = endpoint.promote(config, int(options.number))
        print(text)
        return 0 if result.passed else 1
    else:
        endpoint.serve_forever(config)
    return 0
