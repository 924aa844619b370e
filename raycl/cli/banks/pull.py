"""Pull a bank from the Hugging Face hub, every file checked by its hash; nothing of it is executed.

raycl pull hf://me/tickets                      into the folder tickets
raycl pull hf://me/tickets@COMMIT s3://team/bank
"""

import argparse

from raycl.cli.commands import log_to_stderr, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address", metavar="hf://ORG/NAME[@REVISION]", help="repository that raycl push wrote; default: newest commit"
    )
    parser.add_argument("bank", nargs="?", metavar="BANK", help="folder or URI of a bank, new or not; default: NAME")


def run(options: argparse.Namespace) -> int:
    from raycl.training.records.hub import HubAddress, pull
    from raycl.training.records.named_bank import new_or_known

    log_to_stderr(options)
    address = HubAddress.of(options.address)
    target = new_or_known(options.bank or address.repository.rpartition("/")[2])
    bank, snapshot, branch = pull(address, lambda _: target)
    text = f"branch '{branch}' of {bank.storage.uri} has snapshot {snapshot.number} of {address}"
    tree = {"bank": bank.storage.uri, "branch": branch, "snapshot": snapshot.number, "address": str(address)}
    show(options, text, tree)
    return 0
