"""Files that `raycl predict` answers are read as those of training are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from raycl.data.sources.fields import Columns
from raycl.data.sources.formats import read_rows
from raycl.data.sources.source import SourceFile
from raycl.serve.offline.prediction_input import Input, files_at

FILES: dict[str, tuple[bytes, str]] = {
    "quotes.tsv": (b'text\tlabel\n"so it is\ta\nb\tc\nstop"\td\n', "quotes that are not around whole cells"),
    "marks.csv": ("text ;label\nü;a\n\nb;c\n".encode("utf-16"), "its cells are separated by semicolons"),
    "what?.jsonl": (b'{"text": "a", "label": "b"}\n', ""),
    "nested.json": (b'{"rows": [{"text": "a", "label": "b"},\n{"text": "c", "label": "d"}]}', "the list 'rows'"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_rows_that_training_reads(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    content, note = FILES[name]
    (tmp_path / name).write_bytes(content)
    path = str(tmp_path / name)
    trained = [(row.number, row.text) for row in read_rows(SourceFile.at(path))]
    with caplog.at_level(logging.INFO, "raycl"):
        given = Input(files_at([path]), Columns(label=()))
        assert [(row.number, row.text) for _, row in given.rows()] == trained
        assert [(item.row.number, item.row.text) for item in given.all_rows()] == trained
    assert note in caplog.text
