"""Parts of answers that are damaged, moved or of another version are answered again; strays are no parts."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from damage import KINDS, damaged, flips

from raycl.data.sources.fields import Columns
from raycl.errors import ConfigError, DamagedError, FormatError, RayclError
from raycl.serve.offline.model import OfflineModel, Prediction
from raycl.serve.offline.prediction_files import MANIFEST, part_name, records_of, write_predictions
from raycl.serve.offline.prediction_input import Input, files_at
from raycl.storage import Storage
from raycl.storage.records import seal

ROWS, PART_ROWS = 50, 10


class Model:
    """Answers each text by its length."""

    def __init__(self, snapshot: int = 1) -> None:
        self.snapshot = SimpleNamespace(number=snapshot, sha256=f"{snapshot}" * 64)

    def predict(self, texts: Iterator[str], **_: Any) -> Iterator[Prediction]:
        """One answer for each."""
        for text in texts:
            yield Prediction(str(len(text)), tasks={"lengths": 1.0})


Answer = Callable[[], dict[str, Any]]


@pytest.fixture
def to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setenv("RAYCL_CACHE", str(tmp_path / "cache"))
    return Storage.at(tmp_path / "out")


@pytest.fixture
def answer(to: Storage, tmp_path: Path) -> Answer:
    """Answer the rows into the folder, as `raycl predict --to` does; returns the summary."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "a" * (1 + number)}) + "\n" for number in range(ROWS)))
    return lambda: predicted(to, rows)


def predicted(to: Storage, rows: Path, snapshot: int = 1, **settings: Any) -> dict[str, Any]:
    given = Input(files_at([str(rows)]), Columns(label=()))
    return write_predictions(cast(OfflineModel, Model(snapshot)), given, to, PART_ROWS, **settings)


def parts(to: Storage) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(to.root).glob("part-*")}


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_part_is_answered_again(
    answer: Answer, to: Storage, kind: str, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert answer()["rows"] == ROWS
    whole = parts(to)
    path, other = (Path(to.path(f"part-00000{number}.{suffix}")) for number in (1, 2))
    bad = damaged(whole[path], kind, whole[other])
    path.unlink()
    if bad is not None:
        path.write_bytes(bad)
    summary = answer()
    assert (summary["rows"], summary["answered_now"], summary["errors"]) == (ROWS, PART_ROWS, 0)
    assert parts(to) == whole, "as they were"
    (said,) = caplog.messages or [""]
    assert re.match("a part does not count, so its rows are answered: '.*part-000001", said) or (kind, suffix) == (
        "gone",
        "json",
    )
    assert answer()["answered_now"] == 0


def test_no_flipped_bit_is_silent(answer: Answer, to: Storage) -> None:
    answer()
    whole = parts(to)
    for path in (Path(to.path(f"part-000001.{suffix}")) for suffix in ("jsonl", "json")):
        for bad in flips(whole[path], 100):
            path.write_bytes(bad)
            assert answer()["answered_now"] == PART_ROWS and parts(to) == whole, bad


def test_parts_that_changed_places_are_answered_again(answer: Answer, to: Storage) -> None:
    answer()
    whole = parts(to)
    for suffix in ("jsonl", "json"):
        first, two = (Path(to.path(f"part-00000{number}.{suffix}")) for number in (1, 2))
        first.write_bytes(whole[two])
        two.write_bytes(whole[first])
    assert answer()["answered_now"] == 2 * PART_ROWS and parts(to) == whole


def test_a_part_of_another_input_is_answered_again(answer: Answer, to: Storage, tmp_path: Path) -> None:
    """The folder of the other answers has parts of the same names, each whole."""
    answer()
    whole, other = parts(to), Storage.at(tmp_path / "other")
    predicted(other, tmp_path / "rows.jsonl", snapshot=2)
    for path in parts(other):
        Path(to.path(path.name)).write_bytes(path.read_bytes())
    assert answer()["answered_now"] == ROWS and parts(to) == whole


@pytest.mark.parametrize("number", [0, 99])
def test_a_part_of_another_version_is_answered_again(answer: Answer, to: Storage, number: int) -> None:
    answer()
    whole, path = parts(to), Path(to.path("part-000003.json"))
    path.write_bytes(seal({**json.loads(whole[path])["record"], "format": number}))
    assert answer()["answered_now"] == PART_ROWS and parts(to) == whole


def test_strays_are_no_parts(answer: Answer, to: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is a part that an editor or a file manager copied beside them, whole as it is."""
    answer()
    for name in ("part-000001.jsonl~", ".part-000001.jsonl.swp", "part-000001 (1).jsonl", "part-00001.json", "notes"):
        to.write(name, b"\0\xff not ours")
    assert answer()["answered_now"] == 0 and not caplog.messages
    to.write("part-000005.jsonl", to.read(part_name(4)))
    assert answer()["rows"] == ROWS, "without a record it is none"
    to.write("part-000005.json", to.read("part-000004.json"))
    result = answer()
    assert (result["rows"], result["parts"], result["answered_now"]) == (ROWS, 5, 0)
    assert len(list(records_of(to, result["key"], result["parts"]))) == ROWS


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_of_whole_parts_is_known_without_its_manifest(
    answer: Answer, to: Storage, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="raycl")
    answer()
    path = Path(to.path(MANIFEST))
    whole = path.read_bytes()
    bad = damaged(whole, kind)
    path.unlink()
    if bad is not None:
        path.write_bytes(bad)
    with pytest.raises(RayclError) as raised:  # another input may have been answered here
        predicted(to, tmp_path / "rows.jsonl", task="another")
    assert "\n" not in str(raised.value) and "choose another folder" in str(raised.value)
    caplog.clear()
    assert answer()["answered_now"] == 0 and path.read_bytes() == whole
    assert len(caplog.messages) == (kind != "gone")


def test_a_manifest_of_another_version_is_refused(answer: Answer, to: Storage) -> None:
    answer()
    record = json.loads(to.read(MANIFEST))["record"]
    for number, remedy in ((0, "write it again"), (99, "upgrade raycl")):
        to.write(MANIFEST, seal({**record, "format": number}))
        with pytest.raises(FormatError, match=f"has format {number}, this version reads 1: {remedy}"):
            answer()
    to.write(MANIFEST, seal({**record, "part_rows": 7}))
    with pytest.raises(ConfigError, match="holds answers of another part_rows"):
        answer()


def test_a_part_that_is_damaged_while_a_table_is_made_is_one_sentence(answer: Answer, to: Storage) -> None:
    summary = answer()
    to.write(part_name(2), b"")
    with pytest.raises(DamagedError, match=r"part-000002.jsonl' was changed .*: the same command answers this part"):
        list(records_of(to, summary["key"], summary["parts"]))
