"""The comparison is honest: the plain loop and raycl's loop do the same work. Nothing here looks at a clock."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.streams import plain, stream
from benchmarks.streams.trials import Trial, Typical
from benchmarks.streams.worksheet import write_down
from raycl.errors import ConfigError
from raycl.storage import Storage
from raycl.training import assembly
from raycl.training.records.progress import read_trace
from raycl.training.setup.run_config import RunConfig
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.distributed import DistributedContext


def options(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    stream.add_flags(parser)
    sizes = {"rows": 6, "test-rows": 4, "batch-size": 4, "micro-batch-size": 2}
    given = [f"--{name}={size}" for name, size in sizes.items()]
    return parser.parse_args([*given, "--dtype", "float32", *flags])


def loop(config: RunConfig, folder: Path) -> Storage:
    """raycl's own loop in this process, without Ray."""
    world, storage = DistributedContext.alone(torch.device("cpu")), Storage.at(str(folder))
    parts, open_engine = assembly.build(config, world)
    StreamLoop(parts, open_engine, storage, world).run()
    return storage


@pytest.mark.parametrize("backbone", ["minilm", *stream.FOLDERS])
def test_the_plain_loop_does_the_same_work(
    backbone: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks of two steps (the second one short), two micro-batches each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    where = backbone
    if backbone != "minilm":
        where = str(request.getfixturevalue("shared") / "models" / backbone)
        if not Path(where).is_dir():
            pytest.skip(f"no backbone at '{where}'")
    config = stream.config_of(where, "torch", 1, options(), tmp_path)
    report = plain.work(json.loads(json.dumps(write_down(config, 1))))
    storage = loop(config, tmp_path / "run")
    steps = read_trace(storage)
    assert len(steps) == 4
    assert [step["tokens"] for step in steps] == [step["tokens"] for step in report["steps"]]
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in report["steps"]], abs=1e-4)
    lines = storage.read("predictions/001-sentiment/topic.jsonl").decode().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == report["answers"][1]["topic"]


def test_texts_that_would_be_cut_are_refused(tmp_path: Path) -> None:
    config = stream.config_of("minilm", "torch", 1, options(), tmp_path)
    short = config.stream.model_copy(update={"max_source_tokens": 8})
    with pytest.raises(ConfigError, match="longer than the token limits"):
        write_down(config.model_copy(update={"stream": short}), 1)


def trial(*step_s: float, start_s: float = 0.0, loss: float = 1.0, answer: str = "yes") -> Trial:
    return Trial([loss] * len(step_s), list(step_s), 1.0, [answer, "no"], 100, 50.0, start_s, 10.0)


def comparison(**raycl: Trial) -> stream.Comparison:
    made = stream.Comparison("minilm")
    made.add(stream.PLAIN, 1, trial(1.0, 1.0))
    for engine, result in raycl.items():
        made.add(engine, 1, result)
    return made


def verdicts(made: stream.Comparison) -> dict[str, bool | None]:
    return {figure.name.partition(": ")[2]: figure.ok for figure in stream.figures_of(made)}


def test_repeated_trials_count_by_the_median_of_each_step() -> None:
    assert Typical([trial(1.0, 9.0), trial(2.0, 1.0), trial(3.0, 2.0)]).step_s == [2.0, 2.0]


def test_a_good_run_meets_every_target() -> None:
    assert False not in verdicts(comparison(torch=trial(1.05, 1.05, start_s=5.0))).values()


@pytest.mark.parametrize(
    ("bad", "missed"),
    [
        (trial(1.2, 1.2), {"time per step, median", "time of all steps"}),
        (trial(1.0, 1.0, start_s=25.0), {"start-up of Ray and the worker"}),
        (trial(1.0, 1.0, loss=1.001), {"largest difference of the loss traces"}),
        (trial(1.0, 1.0, answer="maybe"), {"answers that differ"}),
    ],
)
def test_every_missed_target_is_reported(bad: Trial, missed: set[str]) -> None:
    assert {name for name, ok in verdicts(comparison(torch=bad)).items() if ok is False} == missed


def test_with_several_workers_rounding_is_reported_without_a_target() -> None:
    made = comparison(torch=trial(1.0, 1.0))
    made.add("torch", 2, trial(9.0, 9.0, loss=1.001))
    assert all(figure.ok is None for figure in stream.figures_of(made) if "2 workers" in figure.name)


def test_missing_backbones_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "mini-t5").mkdir()
    backbones, notes = stream.backbones(["minilm", "mini-t5", "mini-llama"], tmp_path)
    assert backbones == {"minilm": "minilm", "mini-t5": str(tmp_path / "mini-t5")}
    assert len(notes) == 1 and notes[0].startswith("mini-llama left out")
