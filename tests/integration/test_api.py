"""raycl from Python, without Ray: rows in memory are trained on, looked at, extended, revised and answered from."""

from __future__ import annotations

import doctest
import inspect
import json
import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Lab

import raycl
from raycl import api
from raycl.api import runs
from raycl.errors import ConfigError, ResumeError, RunError, UnreachableError
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
    state, draws = random.getstate(), torch.get_rng_state()
    trained = raycl.train(
        {**settings["stream"], "tasks": [raycl.task("heat", TRAIN, TEST), lab.tasks[0]]},
        settings["method"],
        backbone=Path(settings["backbone"]["name"]),
        name="first",
        dir=tmp_path / "runs: mine",
        bank={"branch": "team/mine"},
        train=settings["train"],
        on_phase=lambda record: phases.append(record["times"]["phase"]),
        **QUICK,
    )
    assert random.getstate() == state and torch.equal(torch.get_rng_state(), draws)
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
        late = iter(model.stream(texts))
    with pytest.raises(RunError, match="this model is closed: load it again"):
        next(late)
    again = raycl.Run(trained.folder)
    assert np.array_equal(again.matrix, trained.matrix, equal_nan=True) and again.bank == trained.bank

    way = raycl.task("way", OTHER, [("blue sky", "down")], definition="Up or down? 🙂")
    longer = trained.add(way, quiet=True, train={"epochs": 2})
    with pytest.raises(ResumeError, match="include_path was None, now '/"):
        longer.add("more", quiet=True, eval={"general": {"include_path": tmp_path}})
    continued = read_state(Storage.at(longer.folder)).config
    trained_for = continued["train"]
    assert (trained_for["epochs"], trained_for["epochs_by_task"]) == (settings["train"]["epochs"], {"way": 2})
    assert continued["stream"]["tasks"][-1]["definition"] == "Up or down? 🙂"
    assert longer.tasks == ["heat", "colour", "way"] and longer.folder == trained.folder
    assert np.array_equal(longer.matrix[:2, :2], before, equal_nan=True)
    better = longer.revise(raycl.task("heat", [*TRAIN, ("ice", "cold")], TEST), name="1e3", quiet=True)
    assert better.tasks == ["colour", "way", "heat"] and Path(better.folder) == tmp_path / "runs: mine" / "1e3"
    assert better.bank.endswith("@team/mine")
    with raycl.load(Path(better.bank)) as model, raycl.load(f"{better.bank.rpartition('@')[0]}@1") as first:
        assert set(model.tasks) == {"heat", "colour", "way"} and first.tasks == ("heat",)


def test_on_phase_fails_and_the_store_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of a call is logged and the next calls come; a store that does not answer is asked again."""
    done: list[str] = []
    looks, called = iter(range(1000)), {name: threading.Event() for name in ("one", "two", "three")}
    threads: list[threading.Thread] = []

    def read(storage: object) -> SimpleNamespace:
        if next(looks) in (1, 3):
            raise UnreachableError("cannot list the journal")
        return SimpleNamespace(phases=list(done))

    def on_phase(name: str) -> None:
        threads.append(threading.current_thread())
        called[name].set()
        if name == "one":
            raise ValueError("no such chart")

    monkeypatch.setattr(runs, "read_state", read)
    monkeypatch.setattr(runs, "POLL_S", 0.001)
    with runs._watched(Storage.at("."), on_phase):
        for name in ("one", "two"):
            done.append(name)
            assert called[name].wait(10)
        done.append("three")
    assert called["three"].is_set() and len(threads) == 3 and len({*threads}) == 1
    assert threads[0] is not threading.main_thread()
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert said.getMessage() == "on_phase failed: ValueError: no such chart; the run continues" and said.exc_info


@pytest.mark.parametrize("is_own", [True, False])
def test_a_call_leaves_logging_as_it_was(
    is_own: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A quiet call after one that was not says errors alone, or what the caller's own logging takes."""
    caplog.set_level(logging.WARNING)  # the root's, which libraries of other tests may have changed
    log, taken = logging.getLogger("raycl"), list[str]()
    own = logging.NullHandler()
    monkeypatch.setattr(own, "handle", lambda record: taken.append(record.getMessage()))
    monkeypatch.setattr(log, "handlers", [own] if is_own else [])
    monkeypatch.setattr(log, "propagate", is_own)

    def prepare() -> SimpleNamespace:
        log.info("a line")
        log.warning("a warning")
        return SimpleNamespace(storage=Storage.at("."))

    def train(prepared: object, options: object) -> None:
        log.error("an error")

    monkeypatch.setattr(runs.driver, "train", train)
    monkeypatch.setattr(runs, "Run", lambda address: address)
    said = []
    for quiet in (False, True):
        runs._trained(prepare, None, quiet)
        assert (log.handlers, log.propagate, log.level) == ([own] if is_own else [], is_own, logging.NOTSET)
        said.append(capsys.readouterr().err)
    assert said == ["a line\na warning\nan error\n", "" if is_own else "an error\n"]
    assert taken == (["a warning", "an error"] if is_own else [])


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

    def quickly(prepare: Callable[[], Prepared], on_phase: Any = None, quiet: bool = True) -> raycl.Run:
        return trained(prepare, on_phase, True)

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
