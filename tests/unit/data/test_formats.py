"""Readers: every format gives the same rows; every fault names file and row, and says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycl.data.sources.fields import Columns, Row
from raycl.data.sources.formats import Format, detect, read_definition, read_rows
from raycl.data.sources.source import SourceFile
from raycl.errors import DataError, StorageError
from raycl.storage import Storage

ROWS = [
    Row(1, "Ein Satz mit ß, {Klammern}\nund Zeilen", ("A",)),
    Row(2, 'he said "no", twice', ("B",)),
    Row(3, "", ("A",)),
]


def instances(*rows: Any) -> str:
    return json.dumps({"Definition": ["Do it. "], "Instances": list(rows)})


def write(folder: Path, name: str, content: str | bytes) -> SourceFile:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return SourceFile.at(path)


def write_as(folder: Path, format: Format) -> SourceFile:
    if format == "natural_instructions":
        rows = [{"input": row.text, "output": list(row.references)} for row in ROWS]
        return write(folder, "x.json", instances(*rows))
    if format == "olora":
        return write(folder, "x.json", json.dumps([{"label": row.references[0], "sentence": row.text} for row in ROWS]))
    if format == "jsonl":
        lines = [json.dumps({"input": row.text, "output": row.references[0]}) for row in ROWS]
        return write(folder, "x.jsonl", "\ufeff" + "\r\n".join(lines))
    if format == "csv":
        cells = ['"' + row.text.replace('"', '""') + f'",{row.references[0]}' for row in ROWS]
        return write(folder, "x.csv", "\n".join(["text,label", *cells]) + "\n")
    columns = {"text": [row.text for row in ROWS], "label": [row.references[0] for row in ROWS], "other": [1, 2, 3]}
    pq.write_table(pa.table(columns), folder / "x.parquet")
    return SourceFile.at(folder / "x.parquet")


@pytest.mark.parametrize("format", ["natural_instructions", "olora", "jsonl", "csv", "parquet"])
def test_every_format_gives_the_same_rows_and_is_detected(tmp_path: Path, format: Format) -> None:
    file = write_as(tmp_path, format)
    assert detect(file) == format
    assert list(read_rows(file)) == list(read_rows(file, format)) == ROWS


def test_definition_is_read_wherever_it_stands(tmp_path: Path) -> None:
    assert read_definition(write(tmp_path, "a.json", instances())) == "Do it."
    assert read_definition(write(tmp_path, "b.json", '{"Instances": [], "Definition": ["late"]}')) == "late"
    assert read_definition(write(tmp_path, "c.json", '{"Definition": [], "Instances": []}')) == ""
    assert read_definition(write(tmp_path, "d.json", '{"Definition": "one text", "Instances": []}')) == "one text"


def test_json_lines_in_a_json_file_are_noticed(tmp_path: Path) -> None:
    file = write(tmp_path, "x.json", '{"text": "a", "label": "b"}\n\n{"text": "c", "label": 3}\n')
    assert list(read_rows(file)) == [Row(1, "a", ("b",)), Row(3, "c", ("3",))]


def test_columns_can_be_named_and_a_csv_may_lack_its_header(tmp_path: Path) -> None:
    file = write(tmp_path, "x.tsv", "1\ttitle\tbody\n")
    columns = Columns(text=("content",), label=("class",), header=("class", "title", "content"))
    assert list(read_rows(file, "auto", columns)) == [Row(1, "body", ("1",))]


def test_a_row_longer_than_the_read_buffer_stays_whole(tmp_path: Path) -> None:
    text = "long " * 500_000
    file = write(tmp_path, "x.jsonl", json.dumps({"text": text, "label": "a"}) + "\n" + '{"text": "b", "label": "c"}')
    assert [len(row.text) for row in read_rows(file)] == [len(text), 1]


BROKEN: list[tuple[str, str | bytes, list[str]]] = [
    ("cut.json", '{"Instances": [{"input": "a", "output": "b"}, {"input": "a"', ["row 2", "malformed JSON", "line 1"]),
    (
        "comma.json",
        '{"Instances": [\n{"input": "a", "output": "b"},\n{"input": "a" "output": "b"}]}',
        ["row 2", "line 3, column 15"],
    ),
    ("noise.json", '{"Instances": [{"input": "a", "output": "b"}]} x', ["malformed JSON", "line 1"]),
    ("utf.json", b'{"Instances": [{"input": "a\xff", "output": "b"}]}', ["row 1", "invalid UTF-8", "convert"]),
    ("no_output.json", instances({"input": "a", "output": "b"}, {"input": "a"}), ["row 2", "no output", "complete"]),
    ("null.json", instances({"input": "a", "output": None}), ["row 1", "no output"]),
    ("empty_list.json", instances({"input": "a", "output": []}), ["row 1", "list of references", "empty"]),
    ("number.json", instances({"input": 7, "output": "b"}), ["row 1", "input is a int", "expected a string"]),
    ("no_text.json", instances({"output": "b"}), ["row 1", "input is a missing value"]),
    ("nested.json", instances({"input": "a", "output": [["b"]]}), ["row 1", "output is a list"]),
    ("truth.json", instances({"input": "a", "output": True}), ["row 1", "output is a bool"]),
    ("scalar.json", '[{"sentence": "a", "label": "b"}, 5]', ["row 2", "found a int", "expected an object"]),
    ("line.jsonl", '{"text": "a", "label": "b"}\n{"text": \n', ["row 2", "malformed JSON at column", "repair"]),
    ("utf.jsonl", b'{"text": "a", "label": "b"}\n\n{"text": "\xe4", "label": "b"}', ["row 3", "invalid UTF-8", "0xe4"]),
    ("list.jsonl", "[1]\n", ["row 1", "found a list"]),
    ("cells.csv", "text,label\na,b\na,b,c\n", ["row 2", "3 cells", "expected 2"]),
    ("open.csv", 'text,label\na,b\n"a,b\n', ["row 2", "malformed CSV"]),
    ("utf.csv", b"text,label\n\xff,b\n", ["row 2", "invalid UTF-8"]),
    ("columns.csv", "body,class\na,b\n", ["no text column among body, class", "columns.text"]),
    ("x.parquet", b"PAR1 not really", ["not a readable Parquet file"]),
    ("x.dat", "a", ["suffix '.dat'", "set 'format'"]),
]


@pytest.mark.parametrize(("name", "content", "words"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_errors_name_file_and_row_in_one_sentence(
    tmp_path: Path, name: str, content: str | bytes, words: list[str]
) -> None:
    file = write(tmp_path, name, content)
    with pytest.raises(DataError) as error:
        list(read_rows(file))
    for word in [str(tmp_path / name), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_parquet_without_a_label_column_and_with_missing_values(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: no label column among text"):
        list(read_rows(SourceFile.at(tmp_path / "a.parquet")))
    pq.write_table(pa.table({"text": ["a", None], "label": [0, 1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet, row 2: the text is a missing value"):
        list(read_rows(SourceFile.at(tmp_path / "b.parquet")))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: the file does not exist"):
        list(read_rows(SourceFile.at(tmp_path / "gone.jsonl")))


@pytest.mark.parametrize("uri", ["hf://datasets/squad", "hf://squad"])
def test_a_hub_data_set_without_its_namespace_is_one_sentence(uri: str) -> None:
    for look in (Storage.at(uri).exists, Storage.at(uri).list, Storage.at(uri).files, SourceFile.at(uri).require):
        with pytest.raises(StorageError, match=r"cannot \w+ 'hf://.*'namespace/name'"):
            look()
