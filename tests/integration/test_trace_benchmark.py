"""`stream.name=trace` from files in the release's layout to a matrix, with TRACE's scores and their variants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_samples import TASKS, write_trace

from raycl.cli.main import main
from raycl.metrics.run_results import read_results, tasks_of, values_of
from raycl.testing.tiny_models import save_model

WORDS = (
    *(
        "A",
        "B",
        "C",
        ".",
        ":",
        ",",
        "?",
        "the",
        "is",
        "on",
        "item",
        "bridge",
        "council",
        "passed",
        "vote",
        "was",
        "rate",
    ),
    *(
        "committee",
        "its",
        "raised",
        "lowered",
        "met",
        "Die",
        "Brücke",
        "ist",
        "zu",
        "return",
        "os",
        "path",
        "count",
        "<",
    ),
    *(
        "NUM_LIT",
        ">",
        "Ann",
        "has",
        "pens",
        "and",
        "buys",
        "whale",
        "breathes",
        "air",
        "态度",
        "文本",
        "2",
        "3",
        "4",
        "5",
    ),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Train LoRA on the eight tasks in this process, with the variants of two scores."""
    write_trace(tmp_path / "data", train=6, test=2)
    save_model("llama", tmp_path / "model", WORDS, positions=128)
    settings = (
        *("stream.name=trace", f"stream.root={tmp_path / 'data'}", "stream.dev_fraction=0"),
        *("stream.max_target_tokens=8", "stream.metric_by_task={MeetingBank: rouge_l_trace, 20Minuten: sari_trace}"),
        *("method=lora", f"backbone.name={tmp_path / 'model'}", "train.epochs=1", "train.batch_size=3"),
        *("launch.mode=local", f"output.dir={tmp_path}", "output.name=run"),
    )
    assert main(["train", *settings, "--quiet"]) == 0
    return tmp_path / "run"


def test_trace_is_learned_task_by_task_and_scored_by_its_metrics(run: Path) -> None:
    results = read_results(run)
    assert results["phases"] == tasks_of(results) == list(TASKS)
    filled = [[score is not None for score in scores] for scores in values_of(results)]
    assert filled == [[column <= row for column in range(8)] for row in range(8)]
    last = dict(zip(TASKS, results["matrix"][-1], strict=True))
    assert all(cell["count"] == 2 and 0 <= cell["value"] <= 100 for cell in last.values())
    assert {"add", "keep", "delete"} <= set(last["20Minuten"]["extra"])
    assert results["metrics"]["bwt"] is not None
    answers = (run / "predictions/007-20Minuten/20Minuten.jsonl").read_text().splitlines()
    assert json.loads(answers[0])["text"].startswith("Die Behörden teilten mit")  # the input, without its prompt
