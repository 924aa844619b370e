"""The bank and snapshot that a user names: by the bank's location, or by the run that publishes to it.

runs/mine/bank      the bank there, its branch main
runs/mine           the bank of that run, and the branch that the run publishes to
PLACE@REF           of either: a branch, a tag, `latest`, a snapshot's number, or the first digits of its hash
hf://ORG/NAME@REV   a bank on the Hugging Face hub at a commit, branch or tag there, pulled into the cache first

An @ may be part of a folder's name too: a text that names a bank as it is has no REF, and a REF with a slash, as in
`runs/mine@team/experiment`, is one if there is a bank in front of it.
"""

from raycl import config as configs
from raycl.bank import Bank, Snapshot
from raycl.bank.branches import MAIN, NOT_SERVED, is_branch_name, missing_branch, resolve
from raycl.config.trust import announce
from raycl.errors import BankError, some
from raycl.storage import Storage
from raycl.training.definition.settings import BankConfig
from raycl.training.records.hub import cached, on_hub
from raycl.training.records.publish import open_bank
from raycl.training.records.run_folder import CONFIG

PARTS = ("snapshots", "adapters", "objects", "pruned", "branches", NOT_SERVED)
"""Names that only the folder of a bank has."""


def find_bank(address: str) -> tuple[Bank, str] | None:
    """Return the bank at a path or URI, or of the run there, and the reference that is meant where none is given: a
    branch, or the number of the snapshot that a commit of the hub holds; None: neither.

    Raises:
        ConfigError: the config of that run cannot be read. StorageError: the place is out of reach.
        BankError: a bank on the hub cannot be pulled.
    """
    if on_hub(address):
        bank, snapshot = cached(address)
        return bank, str(snapshot.number)  # branches of the cache's bank could be moved, the commit stays as it is
    storage = Storage.at(address)
    if any(storage.exists(name) for name in PARTS):
        return Bank(storage), MAIN
    if not storage.exists(CONFIG):
        return None
    tree = configs.from_yaml(storage.read_text(CONFIG), f"{storage.uri}/{CONFIG}")
    config = configs.validate(BankConfig, tree.get("bank") or {})
    announce({"bank": {"dir": config.dir}}, storage.address)
    return open_bank(config, storage), config.branch


def new_or_known(address: str) -> Bank:
    """Return the bank at a path or URI, or a new one in a folder that is new or empty.

    Raises:
        BankError: the folder holds other files, which would be mixed with the bank's.
    """
    storage = Storage.at(address)
    names = storage.list()
    if storage.exists(CONFIG) or (names and not any(name in PARTS for name in names)):
        raise BankError(
            f"'{storage.uri}' holds {some(names, 3)} and is no bank: expected a bank, or a folder that is new or empty"
        )
    return Bank(storage)


def bank_at(address: str) -> tuple[Bank, str]:
    """Return the same.

    Raises:
        BankError: there is none. ConfigError, StorageError: see `find_bank`.
    """
    bank = find_bank(address)
    if bank is None:
        raise BankError(
            f"there is no bank at '{Storage.at(address).uri}': expected the folder or URI of a run or of a bank, such "
            "as RUN/bank"
        )
    return bank


def split_reference(text: str) -> tuple[str, str]:
    """Return the place and the reference of `PLACE@REF`; "": none is given. A place may have an @ in it too."""
    address, at, reference = text.rpartition("@")
    has_slash = "/" in reference
    if on_hub(text) or not (at and reference) or (has_slash and not is_branch_name(reference)):
        return text, ""
    is_reference = "?" in address  # behind the query of a URI, which has no @
    is_reference = is_reference or (find_bank(text) is None and not (has_slash and find_bank(address) is None))
    return (address, reference) if is_reference else (text, "")


def bank_and_reference(text: str) -> tuple[Bank, str]:
    """Return the bank and the reference of `PLACE` or `PLACE@REF`; default: see `find_bank`.

    Raises:
        BankError: there is no such bank.
    """
    place, reference = split_reference(text)
    bank, branch = bank_at(place)
    return bank, reference or branch


def snapshot_at(text: str) -> tuple[Bank, Snapshot]:
    """Return the bank and the snapshot that `PLACE` or `PLACE@REF` names; default: see `find_bank`.

    Raises:
        BankError: there is no such bank or snapshot.
    """
    bank, reference = bank_and_reference(text)
    if not bank.storage.exists("snapshots"):
        raise missing_branch(bank, reference)
    return bank, resolve(bank, reference)
