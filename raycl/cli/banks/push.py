"""Push a snapshot to the Hugging Face hub: adapters as PEFT loads them, router, records and a model card.

raycl push runs/mine/bank me/tickets                       the head of main, in one commit
raycl push runs/mine/bank@3 me/tickets --license apache-2.0 --language en
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from raycl.cli.commands import log_to_stderr, note, show

if TYPE_CHECKING:
    from raycl.bank import Bank, Snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bank", metavar="BANK[@REF]", help="branch, tag, latest, number or hash of a snapshot; default: main"
    )
    parser.add_argument("repository", metavar="ORG/NAME", help="repository of the hub; created if it is new")
    parser.add_argument("--private", action="store_true", help="of a new repository")
    parser.add_argument("--language", action="append", default=[], metavar="CODE", help="for the card: en, de")
    parser.add_argument("--license", metavar="NAME", help="for the card, as the hub names it: apache-2.0")
    parser.add_argument("--dataset", action="append", default=[], metavar="ID", help="for the card")
    parser.add_argument("--with-samples", action="store_true", help="also stored samples, inputs of users")
    parser.add_argument("--yes", action="store_true", help="do not ask before samples are sent")


def run(options: argparse.Namespace) -> int:
    """Push; returns 1 if the user does not want samples to be sent."""
    from raycl.bank.branches import MAIN, branch_names, resolve
    from raycl.errors import BankError
    from raycl.operations.banks.hub import CardFields, push
    from raycl.training.records.hub import HUB, HubAddress
    from raycl.training.records.named_bank import bank_and_reference

    log_to_stderr(options)
    address = HubAddress.of(f"{HUB}{options.repository.removeprefix(HUB)}")
    repository = address.repository
    if address != HubAddress(repository):
        raise BankError(
            f"'{options.repository}' names a folder or a revision, and a push adds a commit to main of a whole "
            f"repository: expected ORG/NAME, for example {repository}"
        )
    bank, reference = bank_and_reference(options.bank)
    snapshot = resolve(bank, reference)
    if options.with_samples and not _agreed(bank, snapshot, options):
        return 1
    fields = CardFields(tuple(options.language), options.license, tuple(options.dataset))
    branch = reference if reference in branch_names(bank) else MAIN
    private = options.private or None
    pushed = push(bank, snapshot, branch, repository, fields, options.with_samples, private)
    lines = [f"pushed snapshot {snapshot.number} to {HUB}{repository}@{pushed.commit}"]
    lines += [f"{name}: in raycl's own format, which PEFT does not load: {why}" for name, why in pushed.own.items()]
    tree = {"snapshot": snapshot.number, "repository": repository, "commit": pushed.commit, "own": pushed.own}
    show(options, "\n".join(lines), tree)
    return 0


def _agreed(bank: Bank, snapshot: Snapshot, options: argparse.Namespace) -> bool:
    """Name the samples that would be sent, and ask; without a terminal that is an error."""
    from raycl.errors import BankError, counted
    from raycl.operations.banks.sample_listing import stored_samples

    counts = stored_samples(bank, snapshot)
    listed = ", ".join(f"{task} {count:,}" for task, count in counts.items()) or "none"
    question = f"{counted(sum(counts.values()), 'row')} of stored samples, inputs of users, are sent: {listed}"
    if options.yes or not counts:
        note(options, question)
        return True
    if not sys.stdin.isatty():
        raise BankError(f"{question}; add --yes to send them, or leave --with-samples out")
    try:
        answer = input(f"{question}. Continue? [y/N] ")
    except EOFError:  # Ctrl-D
        answer = ""
    return answer.strip().lower() in ("y", "yes")
