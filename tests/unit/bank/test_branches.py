"""Branches: moved by compare-and-swap, forward only, kept by prune; leases; the commands; every kind of damage."""

from __future__ import annotations

import multiprocessing
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from bank_samples import child
from damage import KINDS, damaged

from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.activations import Activations, activated
from raycl.bank.branches import Branch, branch_names, check_branch, head_of, line_of, resolve
from raycl.bank.pruning import hold_lease, release_lease
from raycl.errors import BankError, BranchMovedError
from raycl.operations.banks.maintenance import prune, verify
from raycl.storage import Storage
from raycl.storage.numbered import NOTE
from raycl.storage.records import seal

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return Bank.at(tmp_path / "bank")


def test_a_branch_moves_forward_only(bank: Bank) -> None:
    main, other = Branch(bank), Branch(bank, "team/other")
    assert (main.head(), branch_names(bank)) == (None, [])
    with pytest.raises(BankError, match=r"has no branch 'main': expected one of its branches \(none yet\)"):
        head_of(bank)
    first = child(bank, "a")
    assert main.advance(first, "run one").number == 1
    assert main.advance(first, "again").number == 1, "the branch is there already"
    second, rival = child(bank, "b", first), child(bank, "c", first)
    third = child(bank, "d", second)
    assert main.advance(third, "two at once").snapshot == third.number
    assert list(line_of(bank, "main")) == [third.number, second.number, first.number]
    with pytest.raises(
        BranchMovedError, match=rf"snapshot {rival.number} is stored, but branch 'main' of .* snapshot 4"
    ):
        main.advance(rival, "run two")
    with pytest.raises(BranchMovedError):
        main.advance(second, "back")
    other.advance(rival, "run two")
    assert branch_names(bank) == ["main", "team/other"] and head_of(bank, "team/other") == rival
    assert list(main.newest_first()) == [third.number, first.number] and list(main.newest_first(after=2)) == []
    assert verify(bank).problems == [] and verify(bank).strays == []


def test_a_branch_goes_back_to_a_snapshot_that_it_had(bank: Bank) -> None:
    main = Branch(bank)
    with pytest.raises(BankError, match="has no branch 'main'"):
        main.go_back(child(bank, "other"), "back")
    first = child(bank, "a")
    second = child(bank, "b", first)
    third = child(bank, "c", second)
    main.advance(third, "run")
    rival = child(bank, "d", first)
    with pytest.raises(BankError, match=r"never had snapshot 5: expected one that 'log main' lists"):
        main.go_back(rival, "back")
    with pytest.raises(BankError, match=r"points at snapshot 4 already"):
        main.go_back(third, "back")
    assert main.go_back(second, "c is wrong").number == 2 and head_of(bank) == second
    assert list(main.newest_first()) == [second.number, third.number], "nothing is deleted"
    assert (main.left(third.number), main.left(child(bank, "e", third).number)) == (third.number, third.number)
    assert (main.left(second.number), main.left(rival.number)) == (None, None)
    later = child(bank, "f", second)
    main.advance(later, "run")
    assert main.left(third.number) == third.number and main.left(later.number) is None
    assert main.go_back(third, "c was right").snapshot == third.number, "it had that too"
    assert [(left, move.snapshot) for left, move in main.steps_back()] == [(4, 3), (7, 4)]
    assert verify(bank).problems == [] and bank.snapshots() == [1, 2, 3, 4, 5, 6, 7]


def test_a_move_reads_as_much_of_a_long_branch_as_of_a_short_one(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that publishes after each of a hundred tasks would read five thousand records twice."""
    main, names, read = Branch(bank), list[str](), Storage.read

    def reading(storage: Storage, name: str, most: int | None = None) -> bytes:
        names.append(name)
        return read(storage, name, most)

    monkeypatch.setattr(Storage, "read", reading)
    newest: Snapshot | None = None
    counts = []
    for number in range(12):
        newest = child(bank, f"a{number}", newest)
        names.clear()
        assert main.left(newest.number) is None
        main.advance(newest, "run")
        counts.append(len(names))
    assert counts[-1] == counts[2], counts


def _advance(address: str, number: int, start: multiprocessing.synchronize.Barrier, won: multiprocessing.Queue) -> None:  # type: ignore[name-defined, type-arg]
    bank = Bank.at(address)
    snapshot, branch = bank.open(number), Branch(bank)
    start.wait()
    try:
        branch.advance(snapshot, f"writer {number}")
        won.put(number)
    except BranchMovedError:
        won.put(0)


def test_of_writers_that_move_a_branch_at_once_one_wins(bank: Bank) -> None:
    first = child(bank, "a")
    Branch(bank).advance(first, "start")
    children = [child(bank, f"b{number}", first).number for number in range(4)]
    context = multiprocessing.get_context("fork")
    start, won = context.Barrier(len(children)), context.Queue()
    writers = [context.Process(target=_advance, args=(bank.storage.uri, n, start, won)) for n in children]
    for writer in writers:
        writer.start()
    winners = [won.get(timeout=30) for _ in children]
    for writer in writers:
        writer.join()
    assert sorted(winners)[:-1] == [0] * (len(children) - 1) and max(winners) == Branch(bank).head()
    assert bank.snapshots() == [1, 2, 3, 4, 5], "every snapshot is stored"


def test_references_are_branches_numbers_and_hashes(bank: Bank) -> None:
    first = child(bank, "a")
    second = child(bank, "b", first)
    Branch(bank).advance(second, "run")
    for reference in ("main", "2", second.sha256, second.sha256[:8]):
        assert resolve(bank, reference) == second
    assert resolve(bank, first.sha256[:12]) == first and resolve(bank, "1") == first
    for reference in ("nothing", "deadbeef", second.sha256[:7]):
        expected = rf"has no '{reference}': expected a branch or tag \(main\), latest, a snapshot's number"
        if reference.isdigit():  # as a hash's first digits may be
            expected = "has no snapshot"
        with pytest.raises(BankError, match=expected):
            resolve(bank, reference)
    third = child(bank, "c", first)
    assert resolve(bank, "latest") == third and resolve(bank, "main") == second
    for name in ("", "7", "latest", "../up", "a//b", "a b", "a/000001.json", "a/newest.json", "/".join("x" * 9)):
        with pytest.raises(BankError, match="cannot name a branch"):
            check_branch(name)


def test_a_tag_never_moves_and_keeps_its_snapshot(bank: Bank) -> None:
    first = child(bank, "a")
    second = child(bank, "b", first)
    Branch(bank).advance(second, "run")
    tag = Branch(bank, "tags/v1")
    tag.advance(first, "tagged")
    assert resolve(bank, "v1") == resolve(bank, "tags/v1") == first
    for move in (lambda: tag.advance(second, "again"), lambda: tag.go_back(first, "again")):
        with pytest.raises(BankError, match=r"v1'"):
            move()
    assert prune(bank, keep_snapshots=1, grace_s=0.0).snapshots == [] and tag.head() == 1
    tag.delete("by hand")
    with pytest.raises(BankError, match="has no 'v1'"):
        resolve(bank, "v1")
    tag.advance(second, "tagged anew")
    assert resolve(bank, "v1") == second


def test_a_deleted_branch_can_come_back_and_endpoints_see_it(bank: Bank) -> None:
    first = child(bank, "a")
    second, branch = child(bank, "b", first), Branch(bank, "trial")
    branch.advance(second, "run")
    Activations(bank, "trial").add(second, "start")
    assert branch.delete("by hand").number == 2
    assert branch_names(bank) == [] and list(branch.newest_first()) == []
    with pytest.raises(BankError, match="has no branch 'trial'"):
        branch.delete("again")
    decided = Activations(bank, "trial").latest()
    assert decided is not None and branch.advance(first, "restored").number == 3 > decided.seen
    assert list(branch.newest_first(after=decided.seen)) == [1]


@pytest.mark.parametrize("damage", ["cut", "flipped", "moved", "version"])
def test_a_damaged_move_is_found_and_never_followed(bank: Bank, damage: str) -> None:
    first = child(bank, "a")
    second, branch = child(bank, "b", first), Branch(bank)
    branch.advance(first, "run")
    branch.advance(second, "run")
    path = Path(bank.storage.path("branches/main/000002.json"))
    data = path.read_bytes()
    changed = {
        "cut": data[:-9],
        "flipped": data.replace(b'"snapshot": 2', b'"snapshot": 1'),
        "moved": path.with_name("000001.json").read_bytes(),
        "version": seal({"format": 99}),
    }
    path.write_bytes(changed[damage])
    words = {"cut": "damaged", "flipped": "changed after", "moved": "was moved", "version": "format 99"}[damage]
    fresh = Branch(bank)
    for read in (fresh.head, lambda: fresh.advance(child(bank, "c", second), "run"), lambda: branch_names(bank)):
        with pytest.raises(BankError, match=words):
            read()
    assert list(fresh.newest_first()) == [1], "an endpoint passes over it"
    assert any(words in problem for problem in verify(bank).problems)
    with pytest.raises(BankError, match=words):
        prune(bank, keep_snapshots=1, grace_s=0.0)
    assert fresh.delete("damaged").number == 3 and branch_names(bank) == []
    assert fresh.advance(second, "promoted again").number == 4 and head_of(bank) == second


def test_a_snapshot_that_is_not_the_one_a_branch_names_is_refused(bank: Bank) -> None:
    Branch(bank).advance(child(bank, "a"), "run")
    other = Bank.at(Path(bank.storage.path("")).parent / "other")
    child(other, "z")
    bank.storage.write("snapshots/000001.json", other.storage.read("snapshots/000001.json"))
    with pytest.raises(BankError, match=r"branch 'main' names snapshot 1 with SHA-256 \w+, the bank has \w+ under"):
        head_of(bank)


def test_a_head_whose_record_is_lost_is_replaced(bank: Bank) -> None:
    """Its number may be used again; what an older run continues from was not left then."""
    first, branch = child(bank, "a"), Branch(bank)
    branch.advance(first, "run")
    branch.advance(child(bank, "b", first), "run")
    bank.storage.delete("snapshots/000002.json")
    assert branch.left(first.number) is None
    again = child(bank, "c", first)
    assert again.number == 2
    branch.advance(again, "run")
    assert head_of(bank).sha256 == again.sha256


def test_a_way_back_to_a_head_that_is_lost_later_stays_one(bank: Bank) -> None:
    first, branch = child(bank, "a"), Branch(bank)
    branch.advance(first, "run")
    later = child(bank, "b", first)
    branch.advance(later, "run")
    branch.go_back(first, "worse")
    bank.storage.delete("snapshots/000001.json")
    assert branch.left(later.number) == later.number


def test_prune_keeps_each_branch_what_answers_and_what_is_leased(bank: Bank) -> None:
    snapshots = [child(bank, "t0")]
    for number in range(1, 5):
        snapshots.append(child(bank, f"t{number}", snapshots[-1]))
    Branch(bank).advance(snapshots[-1], "run")
    rival = child(bank, "rival", snapshots[0])
    Branch(bank, "sweeps/x/0001").advance(rival, "run")
    orphan = child(bank, "orphan", snapshots[1])
    hold_lease(bank.storage, "/runs/mine", [2])
    Activations(bank).add(3, "start")
    assert prune(bank, keep_snapshots=1, dry_run=True).snapshots == [1, 4], "the one on no branch is young"
    pruned = prune(bank, keep_snapshots=1, grace_s=0.0)
    assert pruned.snapshots == [1, 4, orphan.number] and bank.snapshots() == [2, 3, 5, rival.number]
    assert verify(bank).problems == []
    release_lease(bank.storage, "/runs/mine")
    Branch(bank, "sweeps/x/0001").delete("not the best")
    assert prune(bank, keep_snapshots=1, grace_s=0.0).snapshots == [2, rival.number]


@pytest.fixture
def command(bank: Bank, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`jobs/bank.py` as a function: its words -> what it prints."""
    main = runpy.run_path(str(REPO / "jobs/bank.py"))["main"]

    def run(*words: str, fails: bool = False) -> str:
        status = main([words[0], bank.storage.uri, *words[1:]])
        output, errors = capsys.readouterr()
        assert (status != 0) == fails, output + errors
        return errors if fails else output

    return run


def test_commands(bank: Bank, command: Callable[..., str]) -> None:
    first = child(bank, "a")
    Branch(bank).advance(first, "run /runs/one")
    best, rival = child(bank, "b", first), child(bank, "c", first)
    Branch(bank, "sweeps/s/0003").advance(best, "run /runs/two")
    Branch(bank, "old").advance(rival, "run /runs/three")
    shown = command("branches")
    assert "sweeps/s/0003" in shown and "run /runs/two" in shown and best.sha256[:12] in shown
    assert "branch 'main' points at snapshot 2 (before: snapshot 1)" in command("promote", "sweeps/s/0003")
    assert "'old' (snapshot 3) does not descend from snapshot 2, the head of 'main'" in command(
        "promote", "old", fails=True
    )
    log = command("log").splitlines()
    assert [line.split()[0] for line in log[2:]] == ["2", "1"] and " b " in log[2] and " a " in log[3]
    went = command("rollback", "--to", "1", "--why", "b is wrong")
    assert "branch 'main' went back from snapshot 2 to 1" in went and "`promote 2 --to main` undoes this" in went
    assert "the branch went back from snapshot 2 to 1 (b is wrong)" in command("log")
    assert [line.split()[0] for line in command("log", "sweeps/s/0003").splitlines()[2:]] == ["2", "1"]
    assert "never had snapshot 3" in command("rollback", "--to", "3", fails=True)
    assert "points at snapshot 2 (before: snapshot 1)" in command("promote", "2")
    assert "it was at snapshot 3" in command("delete", "old") and "has no 'old'" in command("log", "old", fails=True)
    assert "points at snapshot 3 (before: nothing)" in command("promote", "3", "--to", "old")


def test_log_names_tasks_that_are_gone_or_learned_again(bank: Bank, command: Callable[..., str]) -> None:
    whole = child(bank, "b", child(bank, "a"))
    entries = [(entry, whole.layouts[entry.layout]) for entry in whole.adapters]
    same = (whole.backbone, whole.router)
    again = bank.snapshot(NewSnapshot(entries, *same, whole.tasks, parent=2, provenance={"phase_name": "b"}))
    less = bank.snapshot(NewSnapshot(entries[:1], *same, whole.tasks[:1], parent=3, provenance={"forgotten": ["b"]}))
    for snapshot in (whole, again, less):
        Branch(bank).advance(snapshot, "run")
    lines = command("log").splitlines()[2:]
    assert [re.split("  +", line.strip())[2] for line in lines] == ["without b", "b again", "b", "a"]


def test_a_way_back_names_the_command_that_undoes_it(bank: Bank, command: Callable[..., str]) -> None:
    """Snapshots 2 and 3 are siblings: `promote` refuses the one after the other."""
    first, branch = child(bank, "a"), Branch(bank)
    branch.advance(first, "run")
    branch.advance(child(bank, "b", first), "run")
    branch.go_back(first, "b is wrong")
    branch.advance(child(bank, "c", first), "run")
    for target in ("2", "1"):
        before = branch.head()
        words = command("rollback", "--to", target).partition("`")[2].partition("`")[0]
        command(*words.split())
        assert branch.head() == before, words


@pytest.mark.parametrize("kind", ["branch", "endpoint"])
def test_a_lost_newest_record_brings_no_older_one_back(bank: Bank, kind: str) -> None:
    """This holds for a branch's moves, and for the decisions of the endpoints that follow it."""
    first = child(bank, "a")
    second, branch, decisions = child(bank, "b", first), Branch(bank), Activations(bank)
    for snapshot in (first, second):
        branch.advance(snapshot, "run")
        decisions.add(snapshot, "test")
    assert verify(bank).problems == [] and verify(bank).strays == []
    folder = {"branch": "branches/main", "endpoint": "serving/main"}[kind]
    lost, note = f"{folder}/000002.json", f"{folder}/{NOTE}"
    whole, noted = bank.storage.read(lost), bank.storage.read(note)
    bank.storage.delete(lost)
    reads = {
        "branch": (Branch(bank).head, branch.head, lambda: branch.advance(child(bank, "c", second), "run")),
        "endpoint": (Activations(bank).latest, decisions.latest, lambda: activated(bank)),
    }[kind]
    for read in reads:
        with pytest.raises(BankError, match=rf"{lost}' is missing: restore a copy, or (delete|activate)"):
            read()
    assert [lost in problem for problem in verify(bank).problems] == [True]
    bank.storage.write(lost, whole)
    assert branch.head() == 2 and verify(bank).problems == []
    bank.storage.delete(f"{folder}/000001.json")
    assert [f"{folder}/000001.json' is missing" in problem for problem in verify(bank).problems] == [True]
    bank.storage.delete(lost)
    if kind == "branch":
        assert branch.delete("lost").number == 3 and branch.head() is None
        assert branch.advance(second, "promoted again").number == 4
    else:
        assert decisions.add(2, "again").number == 3 and activated(bank) == {2}
    assert bank.storage.read(note) != noted


@pytest.mark.parametrize("damage", [*KINDS, "version"])
def test_a_damaged_note_is_named_and_written_again(bank: Bank, damage: str) -> None:
    first = child(bank, "a")
    Branch(bank).advance(first, "run")
    Branch(bank, "side").advance(first, "run")
    path, other = (Path(bank.storage.path(f"branches/{name}/{NOTE}")) for name in ("main", "side"))
    whole = path.read_bytes()
    bad = seal({"format": 99}) if damage == "version" else damaged(whole, damage, other.read_bytes())
    path.unlink()
    if bad is not None:
        path.write_bytes(bad)
    assert head_of(bank) == first, "the moves are whole"
    said = verify(bank).problems
    assert len(said) == (damage != "gone") and all("the next record writes it again" in item for item in said)
    Branch(bank).advance(child(bank, "b", first), "run")
    assert verify(bank).problems == [] and path.read_bytes() != whole


def test_a_strangers_note_with_a_right_hash_is_checked(bank: Bank) -> None:
    Branch(bank).advance(child(bank, "a"), "run")
    for record in ({"folder": "branches/main"}, {"folder": 3, "newest": 1}, {"folder": "branches/main", "newest": "x"}):
        bank.storage.write(f"branches/main/{NOTE}", seal({"format": 1, **record}))
        assert Branch(bank).head() == 1 and "no valid record" in verify(bank).problems[0]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other"])
def test_verify_reads_leases(bank: Bank, damage: str) -> None:
    """`verify` reads leases, so that a damaged one is known before prune is refused."""
    Branch(bank).advance(child(bank, "a"), "run")
    hold_lease(bank.storage, "/runs/mine", [1])
    (file,) = bank.storage.files("leases")
    hold_lease(bank.storage, "/runs/other", [1])
    (other,) = bank.storage.files("leases").keys() - {file}
    whole = bank.storage.read(file)
    assert verify(bank).problems == []
    bank.storage.write(file, damaged(whole, damage, bank.storage.read(other)) or b"")
    (problem,) = verify(bank).problems
    assert file in problem and problem.endswith("remove it if its run is finished or will never be continued")
    with pytest.raises(BankError, match="remove it if its run is finished"):
        prune(bank, keep_snapshots=1, grace_s=0.0)
