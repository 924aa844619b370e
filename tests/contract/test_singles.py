"""What a sweep computes once per settings, `separate`, is accepted by every trial that compares with it.

In this process; that workers make it is the sweep's business (tests/ray/test_sweep.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import Lab, run

from raycl import config as configs
from raycl.run import RunConfig, read_singles
from raycl.storage import Storage
from raycl.sweep.separate import FOLDER, separate_key, separate_tree, singles_of


@pytest.mark.parametrize(
    ("method", "modifiers"),
    [
        ("lora", []),
        ("lora", [{"name": "migu", "layers": ["attention", "ffn"], "threshold": 0.5, "skip_first_task": False}]),
        ({"name": "replay", "learner": "lora"}, []),
        ("sapt", []),
    ],
    ids=["lora", "migu", "replay", "sapt"],
)
def test_tasks_alone_are_taken_from_where_they_were_computed(
    lab: Lab, tmp_path: Path, method: Any, modifiers: list[Any]
) -> None:
    trial = lab.config("bert", method, modifiers=modifiers)
    tree = separate_tree(trial)
    root = Storage.at(tmp_path / FOLDER)
    run(configs.validate(RunConfig, tree), root.sub("alone"))
    root.write_json(f"{separate_key(tree)}.json", {"run": root.sub("alone").address})

    singles = read_singles(singles_of(trial, str(tmp_path)))
    assert singles is not None and set(singles) == {str(task["name"]) for task in lab.tasks}
    orders = configs.as_tree(trial)
    orders["stream"]["tasks"] = orders["stream"]["tasks"][::-1]
    if not modifiers:
        assert read_singles(singles_of(configs.validate(RunConfig, orders), str(tmp_path))) == singles
