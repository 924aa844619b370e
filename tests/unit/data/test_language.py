"""Texts without answers: what is read of files, which words are hidden, and that all of it follows from the seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_samples import MiniLMCodec

from raycl.cli import main
from raycl.data.loader import Collate, GlobalOrder, Loader, eval_batches
from raycl.data.stream import Stream, StreamConfig, open_stream
from raycl.data.text_objectives import HiddenWords, next_words, text_objective, whole_texts
from raycl.errors import ConfigError, DataError
from raycl.training.setup.run_config import load_config
from raycl.types import IGNORE, Task

SPECIAL = frozenset({0, 1, 2})
RULE = HiddenWords(0.15, 2, SPECIAL, np.arange(3, 1000), seed=5)
IDS = np.array([1, *range(10, 110), 0], dtype=np.int32)
TEXTS = [f"text number {number} of a few {'more ' * number}words" for number in range(9)]


def texts_stream(folder: Path, objective: str = "mlm", **settings: Any) -> Stream:
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text("\n\n".join(TEXTS) + "\n")
    config = StreamConfig(
        tasks=({"name": "mine", "path": str(folder)},), dev_fraction=0, objective=objective, **settings
    )
    return open_stream(config, 0)


# ---- which words -----------------------------------------------------------------------------------------------------


def test_fifteen_percent_are_hidden_and_nothing_else_changes() -> None:
    source, target = RULE(IDS, 3, 0)
    hidden = target != IGNORE
    assert hidden.sum() == 15 and not hidden[[0, -1]].any(), "special tokens are never hidden"
    assert (target[hidden] == IDS[hidden]).all() and (source[~hidden] == IDS[~hidden]).all()
    assert source.dtype == target.dtype == np.int32


@pytest.mark.parametrize(("tokens", "hidden"), [(0, 0), (1, 1), (3, 1), (10, 2), (14, 2), (17, 3)])
def test_short_texts_hide_one_word_at_least(tokens: int, hidden: int) -> None:
    assert (RULE(IDS[: tokens + 1], 0, 0)[1] != IGNORE).sum() == hidden


def test_eight_of_ten_are_masked_one_replaced_one_kept() -> None:
    shown = {"masked": 0, "kept": 0, "other": 0}
    for row in range(400):
        source, target = RULE(IDS, row, 0)
        for seen, true in zip(source[target != IGNORE], target[target != IGNORE], strict=True):
            shown["masked" if seen == 2 else "kept" if seen == true else "other"] += 1
    assert sum(shown.values()) == 6000
    assert shown["masked"] / 6000 == pytest.approx(0.8, abs=0.02)
    assert shown["other"] / 6000 == pytest.approx(0.1, abs=0.02)


def test_the_draw_follows_from_seed_epoch_and_row_alone() -> None:
    def hidden(seed: int, row: int, epoch: int) -> list[int]:
        rule = HiddenWords(0.15, 2, SPECIAL, np.arange(3, 1000), seed)
        return np.flatnonzero(rule(IDS, row, epoch)[1] != IGNORE).tolist()

    draws = [hidden(5, 3, 0), hidden(6, 3, 0), hidden(5, 4, 0), hidden(5, 3, 1)]
    assert draws[0] == hidden(5, 3, 0)
    assert len({tuple(draw) for draw in draws}) == 4


def test_the_next_word() -> None:
    source, target = next_words(np.array([1, 7, 8, 9]), 0, 0)
    assert source.tolist() == [1] and target.tolist() == [7, 8, 9]
    codec = MiniLMCodec()
    (start,) = codec.encode_source([""])
    ids, cut = whole_texts(["one two three", "one"], codec, 5)
    words = codec.encode_target(["one two three"])[0]
    assert ids == [[*start, *words][:5], [*start, words[0], codec.eos_id]] and cut == [1]
    codec.encode_source = lambda texts: [[] for _ in texts]  # type: ignore[method-assign]
    assert whole_texts(["one"], codec, 5) == ([[codec.eos_id, words[0], codec.eos_id]], []), "as GPT-2 begins a text"


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_text_a_line(tmp_path: Path) -> None:
    stream = texts_stream(tmp_path / "mine")
    assert stream.tasks == (Task("mine", None, "token_accuracy", "mlm"),)
    codec = MiniLMCodec(needs_labels=True)
    table = stream.table(stream.tasks[0], "train", codec)
    assert table.texts(range(9)) == TEXTS and not table.columns([0]).target_ids[0].size
    (batch,) = eval_batches(Collate([table], 0, text_objective=stream.text_objective(codec, 0)), 16)
    assert batch.target_ids.shape == batch.source_ids.shape
    assert (batch.target_ids != IGNORE).sum() >= 9 and (batch.source_ids == codec.mask_id).any()
    assert (batch.label_ids == IGNORE).all()


def test_texts_to_go_on_from(tmp_path: Path) -> None:
    stream = texts_stream(tmp_path / "mine", "clm", max_source_tokens=12)
    codec = MiniLMCodec()
    table = stream.table(stream.tasks[0], "train", codec)
    assert table.truncated_sources == sum(len(ids) > 12 for ids in whole_texts(TEXTS, codec, 99)[0]) > 0
    (batch,) = eval_batches(Collate([table], 0, text_objective=stream.text_objective(codec, 0)), 16)
    assert batch.source_ids.shape == (9, 1) and batch.target_ids.shape == (9, 11)
    first = batch.target_ids[batch.rows == 0][0]
    assert codec.text(first[first != IGNORE].tolist()).startswith("text number 0 of a few words")


def test_labels_are_neither_needed_nor_read(tmp_path: Path) -> None:
    for suffix, content in {
        "jsonl": "\n".join(json.dumps({"text": text}) for text in TEXTS),
        "csv": "text\n" + "\n".join(TEXTS),
        "json": json.dumps({"Definition": ["Say which."], "Instances": [{"input": text} for text in TEXTS]}),
    }.items():
        folder = tmp_path / suffix
        folder.mkdir()
        for split in ("train", "test"):
            (folder / f"{split}.{suffix}").write_text(content)
        config = StreamConfig(tasks=({"name": "mine", "path": str(folder)},), dev_fraction=0, objective="clm")
        stream = open_stream(config, 0)
        assert stream.table(stream.tasks[0], "train", MiniLMCodec()).texts(range(9)) == TEXTS
    builtin = open_stream(StreamConfig(objective="mlm", train_rows=20, test_rows=8), 0)
    assert len(builtin.tasks) == 5 and all(task.labels is None for task in builtin.tasks)


@pytest.mark.parametrize(("file", "head"), [("texts.txt", ""), ("texts.csv", "text\n")])
def test_one_file_of_texts_is_a_task_and_has_test_rows_taken_from_it(
    tmp_path: Path, file: str, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_text(head + "".join(f"the cat purrs {number}\n" for number in range(10)))
    words = ["stream.objective=mlm", "stream.test_fraction=0.2", "stream.dev_fraction=0"]
    config = load_config(None, [f"stream.tasks=[{tmp_path / file}]", *words]).stream
    stream = open_stream(config, 0)
    assert [len(stream.rows(stream.tasks[0], split)) for split in ("train", "test")] == [8, 2]
    assert main.main(["data", "check", str(tmp_path / file), *words, "--examples", "0", "--json"]) == 0
    (check,) = json.loads(capsys.readouterr().out)
    assert check["kind"] == "texts" and check["splits"]["train"]["rows"] == 8


def test_unsupported_objectives_are_errors(tmp_path: Path) -> None:
    stream = texts_stream(tmp_path / "mine")
    with pytest.raises(
        ConfigError, match="objective is mlm, but the backbone is of kind decoder: expected mlm for enc"
    ):
        stream.check(MiniLMCodec())
    maskless = MiniLMCodec(needs_labels=True)
    maskless.mask_id = -1
    with pytest.raises(ConfigError, match="tokenizer has no mask token"):
        stream.check(maskless)
    with pytest.raises(DataError, match=r"train\.txt: plain text has no answers: expected rows with a label, or set"):
        texts_stream(tmp_path / "mine", "answer")
    with pytest.raises(ValueError, match="prompt is 'olora' and objective is 'mlm': no prompt is put around"):
        StreamConfig(objective="mlm", prompt="olora")
    assert text_objective("answer", MiniLMCodec(), 0.15, 0) is None


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_hidden_words_do_not_depend_on_workers_and_change_each_epoch(tmp_path: Path) -> None:
    stream, codec = texts_stream(tmp_path / "mine"), MiniLMCodec(needs_labels=True)
    table, order = stream.table(stream.tasks[0], "train", codec), GlobalOrder(9, 4, 2, seed=1)

    def seen(workers: int, steps: range) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
        collected = {}
        for rank in range(workers):
            rule = stream.text_objective(codec, 7)
            loader = Loader(Collate([table], 0, text_objective=rule), order, 4 // workers, rank, workers)
            for step in steps:
                for batch in loader.micro_batches(step):
                    for index, row in enumerate(batch.rows.tolist()):
                        length = int(batch.source_mask[index].sum())
                        pair = (batch.source_ids[index, :length].tolist(), batch.target_ids[index, :length].tolist())
                        collected[step, row] = pair
        return {key: pair for key, pair in collected.items() if key[1] >= 0}

    alone = seen(1, range(6))
    assert len(alone) == 18 and alone == seen(2, range(6))
    assert {key: pair for key, pair in alone.items() if key[0] >= 4} == seen(1, range(4, 6)), "wherever a run continues"
    by_row = {row: [alone[key][1] for key in sorted(alone) if key[1] == row] for row in range(9)}
    assert sum(first != second for first, second in by_row.values()) >= 5


def test_a_share_without_texts_still_makes_batches(tmp_path: Path) -> None:
    stream, codec = texts_stream(tmp_path / "mine"), MiniLMCodec(needs_labels=True)
    table = stream.table(stream.tasks[0], "train", codec)
    loader = Loader(
        Collate([table], 0, text_objective=stream.text_objective(codec, 0)), GlobalOrder(9, 4, 1, 0), 2, 1, 2
    )
    (last,) = loader.micro_batches(2)
    assert last.rows.tolist() == [-1, -1] and torch.equal(last.target_ids, torch.full((2, 1), IGNORE))
