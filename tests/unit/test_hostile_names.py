"""Names and texts of a stranger: terminals obey none of their characters, spreadsheet programs run none of them."""

from __future__ import annotations

import csv
import io
import json
import logging
from pathlib import Path

import pytest

from raycl.cli import commands
from raycl.cli.commands import echo
from raycl.data.sources.table_cells import SpreadsheetWriter
from raycl.errors import printable
from raycl.launch.console import PlainFormatter
from raycl.serve.offline.prediction_files import _csv
from raycl.text_tables import render

TITLE, CSI, BACK, TURNED = "\x1b]0;owned\x07", "\x9b2J", "ok\rerror", "\u202efdp.exe"
HOSTILE = (TITLE, CSI, BACK, TURNED, "\x1b[2K", "\x08" * 9, "\x7f", "a\u2028b", "\ud83d")
FORMULAS = ('=HYPERLINK("http://x")', "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", " =1+1", "\t=1", "＝1+1", "=\x1b[2K")
NUMBERS = ("-1", "+2.5", "-1,000.5", "-1e-05", "-5%", ".5")


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_no_output_holds_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str], text: str) -> None:
    echo(f"{text}\tä\n日本")
    record = logging.LogRecord("raycl", logging.INFO, "", 0, "task %s", (text,), None)
    shown = [capsys.readouterr().out, PlainFormatter("%(message)s").format(record), render(text)]
    assert "\tä\n日本\n" in shown[0]
    for item in shown:
        assert all(sign.isprintable() or sign in "\t\n" for sign in item), ascii(item)
        item.encode()
    assert json.loads(printable(json.dumps([text], ensure_ascii=False))) == [text], "JSON stays JSON"


def test_errors_of_commands_hold_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("text,label\na,b\n")
    assert commands.run("report", [f"{tmp_path}/{TITLE}"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and "\\u001b]0;owned\\u0007" in stderr and "\x1b" not in stderr


def test_cells_of_csv_are_no_formulas_and_numbers_stay_numbers() -> None:
    out = io.StringIO()
    SpreadsheetWriter(out).writerows([[*FORMULAS], [*NUMBERS, -1, 2.5, None, "a-b", "a\r\nb\x1b", True]])
    formulas, others = csv.reader(io.StringIO(out.getvalue(), newline=""))
    assert all(cell.startswith("'") for cell in formulas) and "\x1b" not in out.getvalue()
    assert others == [*NUMBERS, "-1", "2.5", "", "a-b", "a\r\nb\\u001b", "True"]


def test_predictions_and_their_columns_are_no_formulas() -> None:
    record = {"text": FORMULAS[0], "@more": "-1", "prediction": "=1+1", "scores": {"=a": -0.5}}
    columns = {name: {"str"} for name in record}
    text = b"".join(_csv(iter([record]), columns)).decode()
    assert list(csv.reader(io.StringIO(text))) == [
        ["text", "'@more", "prediction", "scores"],
        [f"'{FORMULAS[0]}", "-1", "'=1+1", '{"=a": -0.5}'],
    ]
