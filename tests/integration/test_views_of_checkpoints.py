"""Two workers that do not see the same checkpoints continue from the newest one that both can read, or both stop.

Each worker reads a run directory of its own here, as with a file cache on every node; one pair of processes runs all
cases.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from fork_server import ForkServer
from test_damaged_checkpoint import checkpoint, damage
from tiny import Lab, Stop, matrix, run, trace

from raycl.storage import Storage
from raycl.training.records.journal import read_state

PARAMETERS, MANIFEST = "parameters.safetensors", "manifest.json"
Harm = tuple[int, str, str]
"""The checkpoint (-1: the newest), the file, and what happens to it."""

VIEWS: dict[str, tuple[list[Harm], list[Harm], tuple[int, int] | None]] = {
    "all whole": ([], [], (1, 3)),
    "only the first finds the newest damaged": ([(-1, PARAMETERS, "flip")], [], (1, 1)),
    "only the second lacks the newest": ([], [(-1, MANIFEST, "gone")], (1, 1)),
    "each finds another one damaged": ([(-1, PARAMETERS, "cut")], [(-2, PARAMETERS, "flip")], (0, 3)),
    "the older one is damaged for one": ([(-2, PARAMETERS, "flip")], [], (1, 3)),
    "none is whole for both": (
        [(-1, MANIFEST, "cut"), (-3, PARAMETERS, "gone")],
        [(-2, PARAMETERS, "flip")],
        None,
    ),
}
"""Case -> harm to each worker's view, and the phase and step from which both continue; None: both stop."""

LOST_BANK = "the first finds a file for a bank"
"""The harm that worker 0 alone looks for; its error is both workers'."""


@pytest.fixture(scope="module")
def whole(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """Return an undamaged run of three checkpoints."""
    storage = Storage.at(tmp_path_factory.mktemp("whole"))
    run(lab.config("bert", checkpoint={"keep": 3}), storage)
    return storage


@pytest.fixture(scope="module")
def seen(lab: Lab, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every case: `<case>/<rank>`, after both workers went on."""
    root = tmp_path_factory.mktemp("seen")
    tree = lab.tree("bert", checkpoint={"keep": 3})
    left = Storage.at(root / "left")
    with pytest.raises(Stop):
        run(lab.config("bert", checkpoint={"keep": 3}), left, after=7)
    names = read_state(left).checkpoints
    assert [name.partition("-attempt")[0] for name in names] == [
        "phase000-step0000002",
        "phase000-step0000004",
        "phase001-step0000002",
    ]
    for case in [*VIEWS, LOST_BANK]:
        for rank in range(2):
            view = Storage.at(shutil.copytree(left.root, root / case / str(rank)))
            for index, file, how in VIEWS[case][rank] if case in VIEWS else ():
                damage(checkpoint(view, index) / file, how)
    shutil.rmtree(root / LOST_BANK / "0" / "bank")
    (root / LOST_BANK / "0" / "bank").write_text("")
    jobs = [{"tree": tree, "folder": str(root / case), "after": None, "views": True} for case in [*VIEWS, LOST_BANK]]
    (root / "jobs.json").write_text(json.dumps(jobs))
    fork_server.pair("two_workers:main", root, root / "rendezvous", root / "jobs.json", seconds=60)
    return root


def errors(seen: Path, case: str) -> list[str]:
    """Return what each worker stopped with."""
    return [file.read_text() for rank in range(2) if (file := seen / case / str(rank) / "error.txt").exists()]


GOES_ON = [case for case, (*_, start) in VIEWS.items() if start is not None]


@pytest.mark.parametrize("case", GOES_ON)
def test_workers_resume_from_the_newest_common_checkpoint(seen: Path, whole: Storage, case: str) -> None:
    assert errors(seen, case) == []
    storage = Storage.at(seen / case / "0")
    first = json.loads(storage.read_text("trace/attempt-0002.jsonl").splitlines()[0])
    assert (first["phase"], first["step"]) == VIEWS[case][2]
    for mine, other in zip(trace(storage), trace(whole), strict=True):
        assert mine[:2] == other[:2] and mine[2:] == pytest.approx(other[2:], abs=1e-4, rel=1e-4)
    assert matrix(storage) == matrix(whole)


def test_rank_0_names_the_worker_with_a_damaged_checkpoint(seen: Path) -> None:
    said = (seen / "worker0.log").read_text()
    for case in GOES_ON:
        problems = [line for line in said.splitlines() if f"/{case}/" in line and "continues from" in line]
        newest = [rank for rank in range(2) if any(index == -1 for index, *_ in VIEWS[case][rank])]
        assert len(problems) == bool(newest)
        assert all(f"worker {rank + 1} of 2: " in problems[0] for rank in newest)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (
            "none is whole for both",
            r"RunError: no checkpoint of '.*' is whole, though 1 phases are finished \(worker 1",
        ),
        (LOST_BANK, r"StorageError: cannot write '.*/0/bank/.*Not a directory"),
    ],
)
def test_workers_without_a_common_checkpoint_fail_with_one_error(seen: Path, case: str, error: str) -> None:
    result = errors(seen, case)
    assert len(result) == 2 and "\n" not in result[0]
    assert re.match(error, result[0])
    mine, other = (re.sub(r"checkpoint of '[^']*' is whole", "", text) for text in result)  # each names its own folder
    assert mine == other
