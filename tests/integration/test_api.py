"""raycl from Python, without Ray: rows in memory are trained on, looked at, extended, revised and answered from."""

from __future__ import annotations

import doctest
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import Lab

import raycl
from raycl import api
from raycl.api import runs
from raycl.errors import ConfigError, ResumeError
from raycl.launch.prepared_run import Prepared
from raycl.storage import Storage
from raycl.training.records.journal import read_state

REPO = Path(__file__).resolve().parents[2]

TRAIN = [("the sky is blue", "cold"), ("the sea is blue", "cold"), ("the sun is red", "warm"), ("red fire", "warm")] * 3
TEST = [("blue sky", "cold"), ("red sun", "warm")]
OTHER = [(text, {"cold": "down", "warm": "up"}[label]) for text, label in TRAIN]
QUICK: dict[str, Any] = {"quiet": True, "launch": {"mode": "local", "cpus_per_worker": 1}}
"""One thread: by default a local run takes all CPUs, which tests beside it use too, and threads that wait spin."""


def test_train_look_extend_revise_and_answer(lab: Lab, tmp_path: Path) -> None:
    """Also where the folder's name would be a mapping in YAML, and the branch's name has a slash."""
    settings = lab.tree("bert", "slm")
    phases: list[str] = []
    trained = raycl.train(
        {**settings["stream"], "tasks": [raycl.task("heat", TRAIN, TEST), lab.tasks[0]]},
        settings["method"],
        backbone=settings["backbone"],
        name="first",
        dir=str(tmp_path / "runs: mine"),
        bank={"branch": "team/mine"},
        train=settings["train"],
        on_phase=lambda record: phases.append(record["times"]["phase"]),
        **QUICK,
    )
    assert trained.tasks == phases == ["heat", "colour"]
    assert trained.matrix.shape == (2, 2) and np.isnan(trained.matrix[0, 1]) and not np.isnan(trained.matrix[1]).any()
    assert trained.metrics["ap"] == pytest.approx(trained.matrix[1].mean()) and "after colour" in str(trained)
    assert trained.plot(tmp_path / "matrix.png").read_bytes()[:4] == b"\x89PNG"
    before, texts = trained.matrix, [text for text, _ in TEST]
    with trained.load() as model:
        assert model.tasks == ("heat", "colour") and model.answers == "label"
        answers = model.predict(texts)
        assert model.generate(texts[0]) == [answers[0].text] == [item.text for item in model.stream(texts[:1])]
        assert model.route(texts) == [pytest.approx(dict(answer.tasks)) for answer in answers]
    again = raycl.Run(trained.folder)
    assert np.array_equal(again.matrix, trained.matrix, equal_nan=True) and again.bank == trained.bank

    longer = trained.add(raycl.task("way", OTHER, [("blue sky", "down")]), quiet=True, train={"epochs": 2})
    trained_for = read_state(Storage.at(longer.folder)).config["train"]
    assert (trained_for["epochs"], trained_for["epochs_by_task"]) == (settings["train"]["epochs"], {"way": 2})
    assert longer.tasks == ["heat", "colour", "way"] and longer.folder == trained.folder
    assert np.array_equal(longer.matrix[:2, :2], before, equal_nan=True)
    better = longer.revise(raycl.task("heat", [*TRAIN, ("ice", "cold")], TEST), name="again", quiet=True)
    assert better.tasks == ["colour", "way", "heat"] and better.folder != trained.folder
    assert Path(better.folder).parent == Path(trained.folder).parent and better.bank.endswith("@team/mine")
    with raycl.load(better.bank) as model, raycl.load(f"{better.bank.rpartition('@')[0]}@1") as first:
        assert set(model.tasks) == {"heat", "colour", "way"} and first.tasks == ("heat",)


@pytest.fixture
def quick_runs(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`raycl.train` trains a tiny backbone on few rows, in this process and the folder of the test."""
    settings = lab.tree("bert", "slm")
    stream = {**settings["stream"], "train_rows": 16, "test_rows": 6}
    train = raycl.train

    def quick(tasks: Any, method: str = "lora", **given: Any) -> raycl.Run:
        few: dict[str, Any] = {"backbone": settings["backbone"], "train": settings["train"], **QUICK}
        return train({**stream, "tasks": tasks}, settings["method"] if method == "slm" else method, **{**given, **few})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(raycl, "train", quick)
    trained = runs._trained

    def quickly(prepared: Prepared, on_phase: Any = None, quiet: bool = True) -> raycl.Run:
        return trained(prepared, on_phase, True)

    monkeypatch.setattr(runs, "_trained", quickly)


def test_the_notebook_works_as_printed(quick_runs: None, tmp_path: Path) -> None:
    """It runs here without a kernel; `make docs-run` executes it as a reader does."""
    notebook = json.loads((REPO / "docs/tutorials/from-python.ipynb").read_text())
    blocks = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["better"].tasks == namespace["again"].tasks == ["topic", "sentiment", "tickets"]
    assert namespace["run"]._repr_png_()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "runs/watched/results.json").read_text())["finished"]
    assert all(cell["outputs"] for cell in notebook["cells"] if "print(" in "".join(cell["source"]))


def test_every_public_name_has_an_example_that_works(quick_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name's example may use `run` and `model` of those before it."""
    monkeypatch.delenv("WANDB_MODE", raising=False)  # transformers prints a line about it when it is imported
    names = ["task", "train", "load", "Prediction", "Model", "Run"]
    assert sorted([*names, "__version__"]) == dir(raycl)
    runner, variables = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), {"raycl": raycl}
    for value in (getattr(api, name) for name in names):
        members = vars(value).items() if isinstance(value, type) else ()
        public = [(key, item) for key, item in members if key[0] != "_" and (callable(item) or hasattr(item, "fget"))]
        for name, documented in [(value.__name__, value), *public]:
            test = doctest.DocTestParser().get_doctest(inspect.getdoc(documented) or "", variables, name, None, None)
            assert test.examples, f"{value.__name__}, {name}: no example"
            assert runner.run(test, clear_globs=False).failed == 0
            variables = test.globs


def test_errors_are_those_of_the_commands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'train\.epochs'"):
        raycl.train(train={"epoch": 3}, dir=str(tmp_path))
    with pytest.raises(ResumeError, match="holds no run"):
        raycl.Run(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
