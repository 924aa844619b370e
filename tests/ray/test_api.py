"""raycl from Python: a stream of rows in memory is trained, looked at, extended, revised and answered from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tiny import Lab, run

import raycl
from raycl.api import runs
from raycl.cli import main
from raycl.errors import ConfigError, ResumeError
from raycl.launch.driver import Prepared
from raycl.storage import Storage

REPO = Path(__file__).resolve().parents[2]

TRAIN = [("the sky is blue", "cold"), ("the sea is blue", "cold"), ("the sun is red", "warm"), ("red fire", "warm")] * 3
TEST = [("blue sky", "cold"), ("red sun", "warm")]
OTHER = [(text, {"cold": "down", "warm": "up"}[label]) for text, label in TRAIN]
QUICK: dict[str, Any] = {"quiet": True, "in_process": True}


def test_train_look_extend_revise_and_answer(ray_cluster: dict[str, str], lab: Lab, tmp_path: Path) -> None:
    settings = lab.tree("bert", "slm")
    phases: list[str] = []
    trained = raycl.train(
        {**settings["stream"], "tasks": [raycl.task("heat", TRAIN, TEST), lab.tasks[0]]},
        settings["method"],
        backbone=settings["backbone"],
        name="first",
        dir=str(tmp_path),
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
        assert model.generate(texts[0]) == [answers[0].text] == [one.text for one in model.stream(texts[:1])]
        assert model.route(texts) == [pytest.approx(dict(answer.tasks)) for answer in answers]
    again = raycl.Run(trained.folder)
    assert np.array_equal(again.matrix, trained.matrix, equal_nan=True) and again.bank == trained.bank

    longer = trained.add(raycl.task("way", OTHER, [("blue sky", "down")]), **QUICK)
    assert longer.tasks == ["heat", "colour", "way"] and longer.folder == trained.folder
    assert np.array_equal(longer.matrix[:2, :2], before, equal_nan=True)
    better = longer.revise(raycl.task("heat", [*TRAIN, ("ice", "cold")], TEST), name="again", **QUICK)
    assert better.tasks == ["colour", "way", "heat"] and better.folder != trained.folder
    with raycl.load(better.bank) as model, raycl.load(f"{better.bank.rpartition('@')[0]}@1") as first:
        assert set(model.tasks) == {"heat", "colour", "way"} and first.tasks == ("heat",)


def test_the_notebook_works_as_printed(
    ray_cluster: dict[str, str], lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny backbone and few rows, without workers and a kernel; `make docs-run` executes it as a reader does."""
    notebook = json.loads((REPO / "docs/tutorials/from-python.ipynb").read_text())
    blocks = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
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
    assert namespace["better"].tasks == namespace["again"].tasks == ["topic", "sentiment", "tickets"]
    assert namespace["run"]._repr_png_()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "runs/watched/results.json").read_text())["finished"]
    assert all(cell["outputs"] for cell in notebook["cells"] if "print(" in "".join(cell["source"]))


def test_errors_are_those_of_the_commands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'train\.epochs'"):
        raycl.train(train={"epoch": 3}, dir=str(tmp_path))
    with pytest.raises(ResumeError, match="holds no run"):
        raycl.Run(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_workers_write_what_one_process_writes(
    ray_cluster: dict[str, str], lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On hub data and files, resumed part by part; an error of a worker is the sentence that one process gives."""
    bank = run(lab.config("bert", "slm"), Storage.at(tmp_path / "run")).storage.sub("bank").uri
    texts = [text for text, _ in TRAIN]
    (tmp_path / "data").mkdir()
    Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    rows = [{"text": text if number != 3 else 7, "id": number} for number, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["predict", bank, str(tmp_path / "data"), str(tmp_path / "rows.jsonl"), "--part-rows", "5", "--to"]
    assert main.main([*words, str(tmp_path / "one")]) == 0
    assert main.main([*words, str(tmp_path / "two"), "--workers", "2"]) == 0
    assert "24 answered now" in capfd.readouterr().out
    parts = {path.name: path.read_text() for path in (tmp_path / "one").glob("part-*.jsonl")}
    assert '"row": 4, "answer": null, "error": "the text is a int' in "".join(parts.values())
    assert len(parts) == 5 and parts == {
        path.name: path.read_text() for path in (tmp_path / "two").glob("part-*.jsonl")
    }
    (tmp_path / "two" / "part-000003.jsonl").write_text("")
    assert main.main([*words, str(tmp_path / "two"), "--workers", "1"]) == 0
    assert "5 answered now" in capfd.readouterr().out
    assert (tmp_path / "two" / "part-000003.jsonl").read_text() == parts["part-000003.jsonl"]
    (tmp_path / "bad.jsonl").write_text('{"text": 7}\n')
    given = ["predict", bank, str(tmp_path / "bad.jsonl"), "--to", str(tmp_path / "bad"), "--workers", "1"]
    assert main.main(given) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.endswith("bad.jsonl, row 1: the text is a int: expected a string, repair or remove the row")
