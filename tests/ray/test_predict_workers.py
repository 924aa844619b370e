"""Workers of `raycl predict` on Ray write what one process writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from tiny import Lab, run

from raycl.cli import main
from raycl.storage import Storage

ROWS = [("the sky is blue", "cold"), ("the sea is blue", "cold"), ("the sun is red", "warm"), ("red fire", "warm")] * 3


def test_workers_write_what_one_process_writes(
    ray_cluster: dict[str, str], lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On hub data and files, resumed part by part; an error of a worker is the sentence that one process gives."""
    bank = run(lab.config("bert", "slm"), Storage.at(tmp_path / "run")).storage.sub("bank").uri
    texts = [text for text, _ in ROWS]
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
