"""Serve a bank: one endpoint for every task, no task id, always up to date.

raycl serve runs/mine                       until Ctrl-C, on http://127.0.0.1:8000
raycl serve runs/mine/bank@experiment port=9000
raycl serve runs/mine@3                     snapshot 3, whatever is published later
raycl serve hf://me/tickets@COMMIT          a bank of the Hugging Face hub
raycl serve runs/mine activate 3            answer from snapshot 3: a rollback, or forward
raycl serve runs/mine activate BRANCH       answer from the newest snapshot of a branch
raycl serve runs/mine promote 4 --max-drop 1.0
"""

import argparse
import sys
from dataclasses import asdict

from raycl.cli.commands import add_allow_env, is_override, log_to_stderr, note, show

UNNAMED = "RUN_DIR"
"""The bank in a printed config for which none is named."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML; everything it leaves out has a default")
    add_allow_env(parser)
    parser.add_argument("--max-drop", type=float, help="points that an old task may lose (promote; default 1)")
    parser.add_argument("--print-config", action="store_true", help="show all settings, described, and stop")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="BANK[@REF] WORD",
        help="the bank, or the run that publishes to it; activate SNAPSHOT, promote SNAPSHOT, or key.path=value ...",
    )


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Separate the bank, the command and settings."""
    options.overrides = [word for word in options.words if is_override(word)]
    names = [word for word in options.words if not is_override(word)]
    options.bank = None if not names or _is_command(names) else names.pop(0)
    if names and not _is_command(names):
        parser.error(
            f"'{' '.join(names)}' is no command: expected activate SNAPSHOT, promote SNAPSHOT, or nothing, where "
            "SNAPSHOT is a number, a branch or the first digits of a hash"
        )
    options.command, options.snapshot = names or ("serve", "")
    if options.command == "activate" and options.max_drop is not None:
        parser.error("--max-drop has no effect on activate, which asks no gate: leave it out, or promote the snapshot")


def _is_command(names: list[str]) -> bool:
    return len(names) == 2 and names[0] in ("activate", "promote")


def run(options: argparse.Namespace) -> int:
    """Run one command; returns 1 if a candidate was refused."""
    from raycl.config import inline_yaml
    from raycl.serve.settings import at_bank, load_serve_config

    log_to_stderr(options)
    bank = [f"bank={inline_yaml(options.bank)}"] if options.bank else []
    drop = [f"gate.max_drop={options.max_drop}"] if options.max_drop is not None else []
    given = [*bank, *drop, *options.overrides]
    if options.print_config:
        from raycl.config import as_tree, load_tree
        from raycl.config.reference import commented_yaml

        named = "bank" in load_tree(options.config, given)
        settings = load_serve_config(options.config, given if named else [f"bank={UNNAMED}", *given])
        show(options, commented_yaml(settings).rstrip("\n"), as_tree(settings))
        return 0
    config = at_bank(load_serve_config(options.config, given))
    note(options, f"reading the bank {config.bank}", sys.stderr)
    from raycl.serve.deployment import endpoint

    if options.command == "activate":
        decision, number = endpoint.activate(config, options.snapshot)
        if options.json:
            show(options, "", {"decision": decision, "snapshot": number})
    elif options.command == "promote":
        result, text = endpoint.promote(config, options.snapshot)
        show(options, text, {**asdict(result), "passed": result.passed, "reason": result.reason})
        return 0 if result.passed else 1
    else:
        endpoint.serve_forever(config, lambda tree: show(options, "", tree) if options.json else None)
    return 0
