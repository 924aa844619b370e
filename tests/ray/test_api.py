"""raycl from Python: a stream of rows in memory is trained, looked at, extended, revised and answered from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import Lab

import raycl
from raycl.api import runs
from raycl.errors import ConfigError, ResumeError
from raycl.launch.driver import Prepared

REPO = Path(__file__).resolve().parents[2]

TRAIN = [("the sky is blue", "cold"), ("the sea is blue", "cold"), ("the sun is red", "warm"), ("red fire", "warm")] * 3
TEST = [("blue sky", "cold"), ("red sun", "warm")]
OTHER = [(text, {"cold": "down", "warm": "up"}[label]) for text, label in TRAIN]
QUICK: dict[str, Any] = {"quiet": True, "in_process": True}


def test_train_look_extend_revise_and_answer(ray_cluster: dict[str, str], lab: Lab, tmp_path: Path) -> None:
    settings = lab.tree("bert", "slm")
    phases: list[str] = []
    run = raycl.train(
        {**settings["stream"], "tasks": [raycl.task("heat", TRAIN, TEST), lab.tasks[0]]},
        settings["method"],
        backbone=settings["backbone"],
        name="first",
        dir=str(tmp_path),
        train=settings["train"],
        on_phase=lambda record: phases.append(record["times"]["phase"]),
        **QUICK,
    )
    assert run.tasks == phases == ["heat", "colour"]
    assert run.matrix.shape == (2, 2) and np.isnan(run.matrix[0, 1]) and not np.isnan(run.matrix[1]).any()
    assert run.metrics["ap"] == pytest.approx(run.matrix[1].mean()) and "after colour" in str(run)
    assert run.plot(tmp_path / "matrix.png").read_bytes()[:4] == b"\x89PNG"
    before, texts = run.matrix, [text for text, _ in TEST]
    with run.load() as model:
        assert model.tasks == ("heat", "colour") and model.answers == "label"
        answers = model.predict(texts)
        assert model.generate(texts[0]) == [answers[0].text] == [one.text for one in model.stream(texts[:1])]
        assert model.route(texts) == [pytest.approx(dict(answer.tasks)) for answer in answers]
    again = raycl.Run(run.folder)
    assert np.array_equal(again.matrix, run.matrix, equal_nan=True) and again.bank == run.bank

    longer = run.add(raycl.task("way", OTHER, [("blue sky", "down")]), **QUICK)
    assert longer.tasks == ["heat", "colour", "way"] and longer.folder == run.folder
    assert np.array_equal(longer.matrix[:2, :2], before, equal_nan=True)
    better = longer.revise(raycl.task("heat", [*TRAIN, ("ice", "cold")], TEST), name="again", **QUICK)
    assert better.tasks == ["colour", "way", "heat"] and better.folder != run.folder
    with raycl.load(better.bank) as model, raycl.load(f"{better.bank.rpartition('@')[0]}@1") as first:
        assert set(model.tasks) == {"heat", "colour", "way"} and first.tasks == ("heat",)


def test_the_guide_works_as_printed(
    ray_cluster: dict[str, str], lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny backbone and few rows, and without workers."""
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "docs/guides/python.md").read_text(), re.DOTALL)
    settings = lab.tree("bert", "slm")
    stream = {**settings["stream"], "train_rows": 16, "test_rows": 6}
    train = raycl.train

    def quick(tasks: Any, method: str = "lora", **given: Any) -> raycl.Run:
        few: dict[str, Any] = {"backbone": settings["backbone"], "train": settings["train"], **QUICK}
        return train({**stream, "tasks": tasks}, settings["method"] if method == "slm" else method, **{**given, **few})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(raycl, "train", quick)
    trained = runs._trained

    def quickly(prepared: Prepared, on_phase: Any = None, quiet: bool = True, in_process: bool = True) -> raycl.Run:
        return trained(prepared, on_phase, True, True)

    monkeypatch.setattr(runs, "_trained", quickly)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["better"].tasks == ["topic", "sentiment", "tickets"] and len(blocks) == 5
    assert (tmp_path / "first.png").is_file() and (tmp_path / "runs/watched/results.json").is_file()


def test_errors_are_those_of_the_commands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'train\.epochs'"):
        raycl.train(train={"epoch": 3}, dir=str(tmp_path))
    with pytest.raises(ResumeError, match="holds no run"):
        raycl.Run(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
