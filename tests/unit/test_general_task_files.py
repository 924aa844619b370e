"""Task files of lm-eval that `jobs/lm_eval_tasks.py` writes from tasks in the layout of SuperNI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import lm_eval_tasks


def written(folder: Path, **task: Any) -> list[dict[str, Any]]:
    (folder / "data" / "one").mkdir(parents=True)
    (folder / "data" / "one" / "test.json").write_text(json.dumps(task))
    assert lm_eval_tasks.main([str(folder / "data"), str(folder / "out"), "one"]) == 0
    described = yaml.safe_load((folder / "out" / "one.yaml").read_text())
    rows = folder / "out" / "one.jsonl"
    assert described["tag"] == ["superni"] and described["dataset_kwargs"]["data_files"] == {"test": str(rows)}
    return [json.loads(line) for line in rows.read_text().splitlines()]


@pytest.mark.parametrize("definition", ["Say it.\nBe brief.", ["Say it.", "Be brief."]])
def test_the_whole_definition_stands_in_front_of_each_text(tmp_path: Path, definition: object) -> None:
    rows = [{"input": " a sea", "output": ["yes"]}, {"input": "a stone", "output": "no"}]
    first, second = written(tmp_path, Definition=definition, Instances=rows)
    assert first["query"] == "Say it.\nBe brief.\n\na sea\nAnswer:"
    assert [row["choices"][row["gold"]] for row in (first, second)] == ["yes", "no"]
    assert sorted(first["choices"]) == sorted(second["choices"]) == ["no", "yes"]


def test_a_row_with_many_answers_has_fewer_choices(tmp_path: Path) -> None:
    """All others are right too."""
    answers = [f"answer {number}" for number in range(12)]
    rows = [{"input": "any", "output": answers}, *({"input": answer, "output": answer} for answer in answers)]
    first, second, *_ = written(tmp_path, Definition=["Say it."], Instances=rows)
    assert first["choices"] == ["answer 0"] and len(second["choices"]) == 4


def test_a_task_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lm_eval_tasks.main([str(tmp_path), str(tmp_path / "out"), "none"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/none/test.json: the file does not exist") and said.count("\n") == 1
