"""Readers: every format gives the same rows; every fault names file and row, and says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycl.data.sources.fields import Columns, SourceRow
from raycl.data.sources.formats import Format, detect, read_definition, read_rows
from raycl.data.sources.reading import Findings
from raycl.data.sources.source import SourceFile
from raycl.errors import DataError, StorageError
from raycl.storage import Storage

ROWS = [
    SourceRow(1, "Ein Satz mit ß, {Klammern}\nund Zeilen", ("A",)),
    SourceRow(2, 'he said "no", twice', ("B",)),
    SourceRow(3, "", ("A",)),
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
    assert list(read_rows(file)) == [SourceRow(1, "a", ("b",)), SourceRow(3, "c", ("3",))]


def test_columns_can_be_named_and_a_csv_may_lack_its_header(tmp_path: Path) -> None:
    file = write(tmp_path, "x.tsv", "1\ttitle\tbody\n")
    columns = Columns(text=("content",), label=("class",), header=("class", "title", "content"))
    assert list(read_rows(file, "auto", columns)) == [SourceRow(1, "body", ("1",))]


def test_a_row_longer_than_the_read_buffer_stays_whole(tmp_path: Path) -> None:
    text = "long " * 500_000
    file = write(tmp_path, "x.jsonl", json.dumps({"text": text, "label": "a"}) + "\n" + '{"text": "b", "label": "c"}')
    assert [len(row.text) for row in read_rows(file)] == [len(text), 1]


def read(file: SourceFile, columns: Columns | None = None) -> tuple[list[tuple[str, str]], list[str]]:
    """Return texts with their first answers, and how the file was read."""
    findings = Findings()
    rows = list(read_rows(file, columns=columns, findings=findings))
    return [(row.text, row.references[0]) for row in rows], findings.notes


READ_AS: list[tuple[str, str | bytes, list[tuple[str, str]], str]] = [
    (
        "open_quote.tsv",
        'text\tlabel\n"so it is\ta\nb\tc\nthey said: stop"\td\n"he said ""no"""\te\n',
        [('"so it is', "a"), ("b", "c"), ('they said: stop"', "d"), ('he said "no"', "e")],
        "quotes that are not around whole cells are read as text",
    ),
    ("quoted.tsv", 'text\tlabel\n"a\n\tb ""c"""\td\n\ne\tf\n', [('a\n\tb "c"', "d"), ("e", "f")], ""),
    (
        "open_quote.csv",
        'text,label\n"so it is,a\nb,c\nd,e\nf,g\nstop",h\n',
        [("so it is,a\nb,c\nd,e\nf,g\nstop", "h")],
        "row 1: one cell in quotes has 3 lines that look like rows",
    ),
    ("semicolons.csv", "text ;label\na, b;c\n", [("a, b", "c")], "its cells are separated by semicolons"),
    ("spaces.csv", "text , label \na,b\n", [("a", "b")], "spaces around the names of its columns are not read"),
    ("tabs.csv", "text\tlabel\na\tb\n", [("a", "b")], "its cells are separated by tabs"),
    ("commas.tsv", "text,label\na,b\n", [("a", "b")], "its cells are separated by commas"),
    (
        "blank.csv",
        "\ntext,label\n\na,b\n,\n\nc,\n\n",
        [("a", "b"), ("c", "")],
        "rows of blank cells alone are left out (1)",
    ),
    ("long.csv", f"text,label\n{'x' * 140_000},b\n", [("x" * 140_000, "b")], ""),
    ("sixteen.csv", "text,label\n日本 ü,b\n".encode("utf-16"), [("日本 ü", "b")], "read as UTF-16-LE"),
    ("sixteen.json", '[{"text": "日本", "label": "b"}]'.encode("utf-16"), [("日本", "b")], "read as UTF-16-LE"),
    ("separators.jsonl", '{"text": "a\u2028b\u0085c", "label": "d\u2029"}\n', [("a\u2028b\u0085c", "d\u2029")], ""),
    ("separators.csv", "text,label\na\u2028b\u0085c,d\u2029\n", [("a\u2028b\u0085c", "d\u2029")], ""),
    ("what?.jsonl", '{"text": "a", "label": "b"}\n', [("a", "b")], ""),
    (
        "line.json",
        json.dumps({"text": "w " * 40_000, "label": "a"}) + "\n" + '{"text": "b", "label": "c"}',
        [("w " * 40_000, "a"), ("b", "c")],
        "",
    ),
    ("long_line.json", json.dumps({"text": "w " * 40_000, "label": "a"}), [("w " * 40_000, "a")], ""),
    (
        "nested.json",
        json.dumps({"version": 2, "data": [{"text": "a", "label": "b"}]}, indent=1),
        [("a", "b")],
        "its rows are the list 'data'",
    ),
    (
        "one_line.json",
        json.dumps({"version": 2, "data": [{"text": "a", "label": "b"}]}),
        [("a", "b")],
        "its rows are the list 'data'",
    ),
    ("row.json", json.dumps({"text": "a", "label": "b", "spans": [{"at": 1}]}), [("a", "b")], ""),
]


@pytest.mark.parametrize(("name", "content", "pairs", "note"), READ_AS, ids=[case[0] for case in READ_AS])
def test_what_programs_write_is_read_and_says_how(
    tmp_path: Path, name: str, content: str | bytes, pairs: list[tuple[str, str]], note: str
) -> None:
    result, notes = read(write(tmp_path, name, content))
    assert result == pairs
    assert any(f"{name}" in item and note in item for item in notes) if note else notes == []


def test_bad_rows_are_left_out_and_counted_on_request(tmp_path: Path) -> None:
    good, chat = '{"text": "a", "label": "b"}', {"messages": [{"role": "user", "content": "a"}]}
    cases: dict[str, tuple[str, list[str]]] = {
        "x.jsonl": (
            f'{good}\n{{"text": \n[1]\n{{"text": "a"}}\n{good}\n',
            ["row 2: malformed", "row 3: found a list", "row 4"],
        ),
        "x.csv": ("text,label\na,b\na,b,c\na,b\n", ["row 2: 3 cells"]),
        "chat.jsonl": (
            json.dumps({"messages": [*chat["messages"], {"role": "assistant", "content": "b"}]})
            + "\n"
            + json.dumps(chat)
            + "\n"
            + json.dumps({"messages": []}),
            ["row 2: the conversation has no answer", "row 3: the conversation is an empty list"],
        ),
    }
    for name, (content, problems) in cases.items():
        file, findings = write(tmp_path, name, content), Findings("skip")
        rows = list(read_rows(file, findings=findings))
        assert len(rows) == (1 if name == "chat.jsonl" else 2) and findings.left_out == len(problems)
        assert all(words in problem for words, problem in zip(problems, findings.problems, strict=True))
        with pytest.raises(DataError, match=problems[0]):
            list(read_rows(file))


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
    ("utf.csv", b"text,label\n\xff,b\n", ["row 2", "invalid UTF-8", "iconv -f WINDOWS-1252 -t UTF-8 utf.csv"]),
    ("no_mark.csv", "text,label\na,b\n".encode("utf-16-le"), ["zero bytes", "iconv -f UTF-16LE -t UTF-8 no_mark.csv"]),
    ("mac.csv", "text,label\ra,b\rc,d\r", ["carriage returns alone", r"tr '\r' '\n' < mac.csv > converted"]),
    ("cut.csv", "text,label\n日本,b\n".encode("utf-16")[:-1], ["invalid UTF-16-LE", "expected text"]),
    ("half.jsonl", '{"text": "a", "label": "b"}\n{"text": "x\\ud83d", "label": "b"}', ["row 2", "half a character"]),
    ("half_label.jsonl", '{"text": "a", "label": "x\\ud83d"}', ["row 1", "half a character (\\ud83d at character 2)"]),
    ("digits.jsonl", '{"id": ' + "9" * 5000 + "}", ["row 1", "more than 4,300 digits", "repair it"]),
    (
        "digits.json",
        '[{"text": "a", "label": "b"}, {"id": ' + "9" * 2_000_000 + "}]",
        ["row 2", "more than 4,300 digits"],
    ),
    ("deep.jsonl", '{"a": ' + "[" * 100_000, ["row 1", "more than 64 levels deep", "raise stream.limits.depth"]),
    ("deep.json", "{" + '"a": {' * 3000, ["row 1", "more than 64 levels deep", "--depth"]),
    ("deep_list.json", "[" * 400_000, ["row 1", "more than 64 levels deep"]),
    ("levels.jsonl", '{"a": ' + "[" * 64 + "]" * 64 + "}", ["row 1", "more than 64 levels deep"]),
    ("levels.json", '[{"a": ' + "[" * 64 + "]" * 64 + "}]", ["row 1", "more than 64 levels deep"]),
    ("lists.json", '{\n"train": [{"text": "a"}], "test": [{"text": "b"}]}', ["2 lists of objects (train, test)"]),
    ("no_list.json", '{\n"a": 1}', ["no list of objects", "expected rows in one of its fields"]),
    ("twice.csv", "text,text,label\na,b,c\n", ["several columns have the name 'text'", "rename"]),
    ("turns.jsonl", '{"messages": "hello"}', ["row 1", "the conversation is a str", "expected a list of messages"]),
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
