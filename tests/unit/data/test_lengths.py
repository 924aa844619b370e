"""Token lengths that follow the data: how long, of which task, and what is said about rows that are cut."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from chat_samples import chat_codec
from data_samples import MiniLMCodec, WriteTask, news, open_agnews

from raycl.data.lengths import Positions, fit_lengths, lines_of_cuts, measure_cuts
from raycl.data.settings import MOST_LENGTHS, USUAL_LENGTHS
from raycl.data.stream import StreamConfig, TaskSpec, open_stream

ENDLESS = Positions(math.inf, math.inf)
LONG = ("word " * 300, "World")
"""A row of more tokens than are usual."""


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_longest_row_of_any_split_is_whole(write_task: WriteTask, codec: MiniLMCodec, split: str) -> None:
    rows = {"train": news(40), "test": news(8)}
    rows[split] = [*rows[split], LONG]
    stream = fit_lengths(open_agnews(write_task("agnews", rows["train"], rows["test"])), codec, ENDLESS)
    longest = len(stream.prompt(stream.tasks[0], codec).encode([LONG[0]], codec)[0])
    limits = stream.config.max_source_tokens_by_task
    assert longest <= limits["agnews"] < longest + 8 and limits["agnews"] % 8 == 0
    assert stream.config.max_target_tokens_by_task == {"agnews": USUAL_LENGTHS[1]}
    assert measure_cuts(stream, MiniLMCodec(False, *stream.token_limits), ENDLESS) == {}


def test_what_fits_and_what_is_given_stays_as_it_is(write_task: WriteTask, codec: MiniLMCodec) -> None:
    root = write_task("agnews", news(40), [*news(8), LONG])
    stream = fit_lengths(open_agnews(root, max_source_tokens=64), codec, ENDLESS)
    assert stream.config.limits_of("agnews") == (64, USUAL_LENGTHS[1])
    assert stream.config.max_source_tokens_by_task == {}
    given = open_agnews(root, max_source_tokens_by_task={"agnews": 40}, max_target_tokens=3)
    assert fit_lengths(given, codec, ENDLESS) is given


def test_positions_and_ceilings_end_lengths_and_cuts_are_said(write_task: WriteTask, codec: MiniLMCodec) -> None:
    root = write_task("agnews", [*news(40), ("word " * 3000, "World")], news(8))
    ends = {ENDLESS: (MOST_LENGTHS[0], 32), Positions(200, 200): (168, 32), Positions(60, 60): (30, 30)}
    for positions, most in ends.items():
        stream = fit_lengths(open_agnews(root), codec, positions)
        assert stream.token_limits == most
        stream.cuts.update(measure_cuts(stream, MiniLMCodec(False, *most), positions))
        (task,) = stream.tasks
        cut = stream.cuts["agnews"]["train"]["sources"]
        endless = positions == ENDLESS
        assert cut["limit"] == most[0] and cut["rows"] and cut["room"] == (None if endless else most[0])
        line = next(lines_of_cuts(stream, task))
        advice = "max_source_tokens_by_task.agnews=" if endless else "choose a backbone with more positions"
        assert f" cut to {most[0]} tokens: their inputs lose the end" in line and advice in line
        assert " 1 tokens" not in line and " on average and " in line


def test_tools_that_take_more_than_the_usual_tokens_are_whole(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "how warm a city is " * 9}}
    messages = [{"role": "user", "content": "the sky is"}, {"role": "assistant", "content": "blue"}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"tools": [tool], "messages": messages}) + "\n")
    config = StreamConfig(tasks=(TaskSpec(name="chat", path=str(tmp_path)),), dev_fraction=0, cache_dir=str(tmp_path))
    codec = chat_codec("bytes", "in-tags")
    stream = fit_lengths(open_stream(config, seed=0), codec, ENDLESS)
    source, target = stream.token_limits
    assert USUAL_LENGTHS[0] < source < MOST_LENGTHS[0] and target == USUAL_LENGTHS[1]
    codec.max_source_tokens, codec.max_target_tokens = source, target
    assert measure_cuts(stream, codec, ENDLESS) == {}
