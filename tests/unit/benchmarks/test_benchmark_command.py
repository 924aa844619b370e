"""The command of benchmarks: what it lists, and what it says before it measures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import command, many_runs
from benchmarks.processor_time import Spent


def test_the_help_lists_each_benchmark() -> None:
    assert [name for name in command.BENCHMARKS if f"benchmark.py {name} " not in (command.__doc__ or "")] == []


def test_what_cannot_be_measured_or_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    wrong = {"--device": "benchmark gpu: --device is cpu", "--json": f"cannot write '{tmp_path}/file/a.json': "}
    for option, words in wrong.items():
        given = ["gpu", option, {"--device": "cpu", "--json": f"{tmp_path}/file/a.json"}[option]]
        assert command.main(given) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"error: {words}") and said.count("\n") == 1


@pytest.mark.parametrize("count", [1, 3])
def test_memory_of_many_runs_is_that_of_the_last_above_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    for seed in range(count):
        results = tmp_path / "warm" / "runs" / f"lora-s{seed}" / "results.json"
        results.parent.mkdir(parents=True)
        results.write_text(json.dumps({"peak_memory_mb": 100 + seed}))
    spent: Iterator[Spent] = iter([Spent(4.0, 2.0), Spent(1.0, 1.0)])
    monkeypatch.setattr(many_runs, "spent_by", lambda words, imports=None: next(spent))
    values = [figure.value for figure in many_runs.measure_runs(count, tmp_path, None)]
    assert values == [0.25, 0.5, *[1.0] * (count > 1)]
