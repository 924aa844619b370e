"""`eval.at_epochs`: a curve over the epochs of a task, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

from crash_copies import run_and_leave
from tiny import TASKS, Lab, matrix, run, trace

from raycl.operations.report.page.sections import sections_of
from raycl.operations.report.tables import matrix_table
from raycl.storage import Storage


def test_a_curve_over_epochs_survives_a_stop_and_leaves_training_as_it_was(lab: Lab, tmp_path: Path) -> None:
    plain, whole, killed = (Storage.at(tmp_path / name) for name in ("plain", "whole", "killed"))
    train, curve = {"epochs": 2}, {"at_epochs": 1}
    run(lab.config("llama", "lora", train=train), plain)
    run_and_leave(lab.config("llama", "lora", train=train, eval=curve), whole, {6: tmp_path / "killed"})
    assert trace(whole) == trace(plain) and matrix(whole) == matrix(plain)
    tree = whole.read_json("results.json")
    assert {task: list(scores) for task, scores in tree["epochs"].items()} == {key: ["1", "2"] for key in TASKS}
    for place, task in enumerate(TASKS):
        assert tree["epochs"][task]["2"] == matrix(whole)[place][place]
    run(lab.config("llama", "lora", train=train, eval=curve), killed)
    assert killed.read_json("results.json")["epochs"] == tree["epochs"]
    assert "after epoch" in str(matrix_table(tree))
    assert any(section.title == "Epochs of a task" and section.figure for section in sections_of([tree]))
    assert plain.read_json("results.json")["epochs"] == {}
