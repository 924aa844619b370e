"""The commands of `raycl bank` that show and move branches."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from datetime import datetime
from typing import Any

from raycl.bank import Bank, Snapshot
from raycl.bank.branches import Branch, branch_names, head_of, is_branch_name, resolve
from raycl.bank.manifest import snapshot_file
from raycl.errors import BankError, BranchMovedError
from raycl.operations.banks import merge as merging
from raycl.operations.banks.command_result import CommandResult, table
from raycl.training.records.named_bank import bank_and_reference


def branches(bank: Bank, options: Namespace) -> CommandResult:
    """Return each branch, and what moved it where it is."""
    tree: list[dict[str, Any]] = []
    for name in branch_names(bank):
        last, head = Branch(bank, name).last(), head_of(bank, name)
        assert last is not None, "a branch that exists has moved"
        tasks = [task.name for task in head.tasks]
        tree.append(
            {
                "branch": name,
                "snapshot": head.number,
                "sha256": head.sha256,
                "tasks": tasks,
                "why": last.why,
                "time": last.time,
            }
        )
    columns = ("branch", "snapshot", "sha256", "tasks", "moved", "by")
    rows = [
        (
            branch["branch"],
            branch["snapshot"],
            _digits(branch),
            ", ".join(branch["tasks"]),
            _when(branch),
            branch["why"],
        )
        for branch in tree
    ]
    return CommandResult(table(columns, rows), tree)


def log(bank: Bank, options: Namespace) -> CommandResult:
    """Return a snapshot's line back to the first: what each added, and what a branch left when it went back there."""
    entries = []
    is_branch = is_branch_name(options.branch) and Branch(bank, options.branch).head() is not None
    back = Branch(bank, options.branch).steps_back() if is_branch else []
    snapshot: Snapshot | None = resolve(bank, options.branch)
    while snapshot is not None:
        parent = snapshot.parent
        before = bank.open(parent) if parent is not None and bank.storage.exists(snapshot_file(parent)) else None
        known = {task.name for task in before.tasks} if before else set()
        entries.append(
            {
                "snapshot": snapshot.number,
                "sha256": snapshot.sha256,
                "parent": parent,
                "tasks_added": [task.name for task in snapshot.tasks if task.name not in known],
                "tasks": [task.name for task in snapshot.tasks],
                "run": snapshot.provenance.get("run", ""),
                "went_back_from": [left for left, move in back if move.snapshot == snapshot.number],
            }
        )
        snapshot = before
    end = "" if entries[-1]["parent"] is None else f"\nsnapshot {entries[-1]['parent']} and those before it were pruned"
    rows = [
        (entry["snapshot"], _digits(entry), ", ".join(entry["tasks_added"]), len(entry["tasks"]), entry["run"])
        for entry in entries
    ]
    line = {entry["snapshot"] for entry in entries}
    steps = [
        f"\n{_when(asdict(move))}: the branch went back from snapshot {left} to {move.snapshot} ({move.why})"
        for left, move in back
        if move.snapshot in line
    ]
    return CommandResult(
        table(("snapshot", "sha256", "tasks added", "tasks", "run"), rows) + end + "".join(steps), entries
    )


def promote(bank: Bank, options: Namespace) -> CommandResult:
    """Return a branch moved forward to a snapshot that descends from it."""
    snapshot, target = resolve(bank, options.branch), Branch(bank, options.to)
    before = target.head()
    try:
        target.advance(snapshot, f"promoted from {options.branch}")
    except BranchMovedError as error:
        raise BankError(
            f"'{options.branch}' (snapshot {snapshot.number}) does not descend from snapshot {before}, the head of "
            f"'{options.to}', so '{options.to}' would lose what it has: train again from '{options.to}', or promote "
            "onto another branch with --to"
        ) from error
    tree = {"branch": options.to, "before": before, "snapshot": snapshot.number, "sha256": snapshot.sha256}
    moved = f"branch '{options.to}' points at snapshot {snapshot.number}"
    return CommandResult(f"{moved} (before: {'nothing' if before is None else f'snapshot {before}'})", tree)


def rollback(bank: Bank, options: Namespace) -> CommandResult:
    """Return a branch moved back to a snapshot that it had."""
    snapshot, branch = resolve(bank, options.to), Branch(bank, options.branch)
    before = branch.head()
    branch.go_back(snapshot, options.why)
    tree = {"branch": branch.name, "before": before, "snapshot": snapshot.number, "sha256": snapshot.sha256}
    text = (
        f"branch '{branch.name}' went back from snapshot {before} to {snapshot.number}, and so do endpoints that "
        f"follow it; the next task is learned from there, and `promote {before} --to {branch.name}` goes forward again"
    )
    return CommandResult(text, tree)


def merge(bank: Bank, options: Namespace) -> CommandResult:
    """Return a snapshot with the tasks of two."""
    ours = resolve(bank, options.ours)
    other, reference = bank_and_reference(options.theirs) if "@" in options.theirs else (bank, options.theirs)
    theirs = resolve(other, reference)
    merged = merging.merge(bank, ours, theirs, other, options.with_samples)
    tree = {"snapshot": merged.number, "tasks": [task.name for task in merged.tasks], "branch": None}
    text = f"snapshot {merged.number} has the tasks of snapshots {ours.number} and {theirs.number}"
    name = options.to or (options.ours if is_branch_name(options.ours) else None)
    if name is not None:
        Branch(bank, name).advance(merged, f"{options.theirs} merged")
        tree["branch"] = name
        text += f"; branch '{name}' points at it"
    text += f": {', '.join(task.name for task in merged.tasks)}"
    back = f"`rollback --to {ours.number}` goes back to one that has"
    return CommandResult(f"{text}\nit has no training state: it answers, and no run can start from it; {back}", tree)


def delete(bank: Bank, options: Namespace) -> CommandResult:
    """Return a branch deleted."""
    branch = Branch(bank, options.branch)
    head = next(branch.newest_first(), None)
    branch.delete("deleted by hand")
    text = (
        f"branch '{options.branch}' is deleted (it was at snapshot {head}); its snapshots stay until they are pruned "
        f"(prune --keep-snapshots), `promote {head} --to NAME` brings it back"
    )
    return CommandResult(text, {"branch": options.branch, "snapshot": head})


def _digits(entry: dict[str, Any]) -> str:
    return str(entry["sha256"])[:12]


def _when(entry: dict[str, Any]) -> str:
    return datetime.fromtimestamp(entry["time"]).isoformat(" ", "seconds")
