"""Serve what a bank holds: one endpoint for every task, no task id, always up to date.

    python jobs/serve.py --bank runs/mine/bank                       until Ctrl-C, on http://127.0.0.1:8000
    python jobs/serve.py --bank runs/mine/bank port=9000 follow.enabled=false
    python jobs/serve.py --bank runs/mine/bank activate 3            answer from snapshot 3: a rollback, or forward
    python jobs/serve.py --bank runs/mine/bank promote 4 --max-drop 1.0

Why it exists: the command-line door to `raycl.serve`.
What it does not know: how anything is answered.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from raycl.config.reference import commented_yaml
from raycl.errors import RayclError
from raycl.serve.deployment import endpoint
from raycl.serve.settings import ServeConfig, load_serve_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 1 if it failed or a candidate was refused."""
    options = _parse(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("raycl").setLevel(logging.INFO)
    try:
        config = _config(options)
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
    except RayclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _config(options: argparse.Namespace) -> ServeConfig:
    bank = [f"bank={options.bank}"] if options.bank else []
    drop = [f"gate.max_drop={options.max_drop}"] if options.max_drop is not None else []
    return load_serve_config(options.config, [*bank, *drop, *options.overrides])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bank", metavar="PATH", help="folder or URI of the bank")
    parser.add_argument("--config", metavar="FILE", help="YAML; everything it leaves out has a default")
    parser.add_argument("--max-drop", type=float, help="points that an old task may lose (promote; default 1)")
    parser.add_argument("--print-config", action="store_true", help="show all settings, described, and stop")
    parser.add_argument("words", nargs="*", metavar="WORD", help="activate N, promote N, or key.path=value ...")
    options = parser.parse_intermixed_args(arguments)
    commands = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    options.command, options.number = [*commands, "", ""][:2] if commands else ["serve", ""]
    known = options.command == "serve" or (
        options.command in ("activate", "promote") and options.number.isdecimal() and len(commands) == 2
    )
    if not known:
        parser.error(f"'{' '.join(commands)}' is no command: expected activate NUMBER, promote NUMBER, or nothing")
    return options


if __name__ == "__main__":
    sys.exit(main())
