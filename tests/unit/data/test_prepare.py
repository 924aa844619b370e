"""Tokenisation: what is cut, what never is, what is counted."""

from __future__ import annotations

import pytest
from data_samples import MiniLMCodec, WriteTask, news, open_agnews

from raycl.data.prepare import TokenLimits, check_codec, fit_remarked, fit_sources, fit_targets
from raycl.data.prompts import Prompt, long
from raycl.data.tokens import Cut
from raycl.errors import ConfigError, DataError
from raycl.types import Task

PROMPT = long("Say which of the topics this is about.")


@pytest.mark.parametrize("limit", [16, 17, 18, 25, 40])
def test_only_the_input_text_is_cut(codec: MiniLMCodec, limit: int) -> None:
    texts = ["short", "one two three " * 40, "antidisestablishmentarianism " * 9, "a.b,c!" * 30, "", "ende\u0301 " * 50]
    ids, cut, _ = fit_sources(texts, PROMPT, codec, limit)
    assert len(cut) == 4 and all(len(result) <= limit for result in ids)
    template = codec.encode_source([PROMPT.around("")])[0]
    cue = len(codec.encode_source([PROMPT.suffix])[0]) - 1
    for text, result in zip(texts, ids, strict=True):
        head, tail = template[:-cue], template[-cue:]
        assert result[: len(head)] == head and result[-len(tail) :] == tail, text
    assert len(ids[1]) == limit
    assert ids[0] == codec.encode_source([PROMPT.around("short")])[0]


@pytest.mark.parametrize("limit", [18, 25, 40])
def test_a_remark_stands_behind_the_text_as_it_was_cut(codec: MiniLMCodec, limit: int) -> None:
    texts, remarks = ["short", "one two three " * 40], [" as many words as there are", ""]
    plain = fit_sources(texts, PROMPT, codec, limit)[0]
    ids = fit_remarked(texts, remarks, PROMPT, codec, limit)
    assert ids[0] == codec.encode_source([PROMPT.around("short as many words as there are")])[0]
    assert ids[1] == plain[1] and len(ids[0]) > len(plain[0])
    behind = fit_remarked(texts[1:], remarks[:1], PROMPT, codec, limit)[0]
    cue, remark = (len(codec.encode_source([text])[0]) - 1 for text in (PROMPT.suffix, remarks[0]))
    assert behind[: limit - cue] == plain[1][:-cue], "no more of the text is cut"
    assert len(behind) == limit + remark - 1 and behind[-cue:] == plain[1][-cue:]


def test_long_answers_keep_their_end(codec: MiniLMCodec) -> None:
    ids, cut = fit_targets(["", ""], ["yes", "a very long answer indeed with many words"], Prompt(), codec, 4)
    assert cut == [5] and len(ids[1]) == 4 and ids[1][-1] == ids[0][-1] == codec.eos_id
    assert codec.text(ids[1][:-1]) == "a very long"


def test_what_is_cut_is_stored(write_task: WriteTask, codec: MiniLMCodec) -> None:
    root = write_task("agnews", news(40), [*news(4), ("word " * 200, "World")])
    stream = open_agnews(root, max_source_tokens=32, max_target_tokens=3)
    task = stream.tasks[0]
    for _ in range(2):
        table = stream.table(task, "test", codec)
        assert (table.truncated_sources, table.truncated_targets) == (1, 1)
        assert table.source_lengths.max() == 32
    longest = len(stream.prompt(task, codec).encode(["word " * 200], codec)[0])
    assert table.cuts[0] == Cut(32, 1, longest - 32, longest - 32)
    assert (table.cuts[1].limit, table.cuts[1].rows) == (3, 1)
    assert table.texts([4]) == ["word " * 200]


def test_the_codecs_own_limits_hold_too(write_task: WriteTask) -> None:
    stream = open_agnews(write_task("agnews", news(40), news(8)), max_source_tokens=128)
    table = stream.table(stream.tasks[0], "train", MiniLMCodec(max_source_tokens=20))
    assert table.source_lengths.max() == 20


def test_encoders_get_plain_text_and_labels(write_task: WriteTask) -> None:
    encoder = MiniLMCodec(needs_labels=True)
    stream = open_agnews(write_task("agnews", news(40), news(8)))
    task = stream.tasks[0]
    assert stream.prompt(task, encoder) == Prompt()
    table = stream.table(task, "test", encoder)
    assert not table.has_targets and [len(ids) for ids in table.columns([0, 1]).target_ids] == [0, 0]
    assert table.labels(range(8)).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert encoder.text(table.columns([1]).source_ids[0].tolist()) == news(2)[1][0].strip()


def test_encoders_refuse_free_text() -> None:
    task = Task("free", None, "rouge_l")
    with pytest.raises(DataError, match="task 'free' has free-text answers: an encoder-only backbone"):
        check_codec(task, Prompt(), MiniLMCodec(needs_labels=True), TokenLimits(64, 8))


def test_a_prompt_without_room_for_text_is_refused_before_rows_are_read(
    write_task: WriteTask, codec: MiniLMCodec
) -> None:
    root = write_task("agnews", news(20), news(4), definition="Consider the topics. " * 10)
    stream = open_agnews(root, max_source_tokens=40)
    with pytest.raises(ConfigError, match=r"takes 44 tokens .* sources hold 40: set max_source_tokens to at least 48"):
        stream.check(codec)
    open_agnews(root, max_source_tokens=48).check(codec)


def test_other_settings_are_other_tables(write_task: WriteTask, codec: MiniLMCodec) -> None:
    root = write_task("agnews", news(40), news(8))
    first = open_agnews(root)
    task = first.tasks[0]
    for settings in ({"prompt": "plain"}, {"max_source_tokens": 16}, {"dev_rows": 1}):
        other = open_agnews(root, **settings).table(task, "train", codec)
        assert other._entry.path != first.table(task, "train", codec)._entry.path
