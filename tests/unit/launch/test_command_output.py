"""Tests of command output besides results: bars and colour on a terminal, lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from raycl.cli.commands import COMMANDS, note, parser_of, run, show
from raycl.launch import console
from raycl.progress import counted_off, report
from raycl.serve import settings
from raycl.serve.deployment import endpoint


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """raycl's logger, as it was afterwards."""
    logger = logging.getLogger("raycl")
    before = logger.handlers, logger.level, logger.propagate
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.level, logger.propagate = before


def on_terminal(monkeypatch: pytest.MonkeyPatch, quiet: bool = False) -> Terminal:
    """Return what a command writes to a terminal."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    for name in ("NO_COLOR", "TERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    console.log_to_stderr(quiet)
    return terminal


def test_a_terminal_shows_a_bar_and_a_warning_in_colour(monkeypatch: pytest.MonkeyPatch, log: logging.Logger) -> None:
    terminal = on_terminal(monkeypatch)
    for number in counted_off(range(4), "reading adapters"):
        if number == 2:
            log.info("a line")
            log.warning("a [warning]")
    shown = terminal.getvalue()
    assert "reading adapters" in shown and "0/4" in shown and "a line" in shown
    assert "\x1b[33ma [warning]\x1b[0m" in shown


def test_what_is_printed_under_a_bar_stays_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, log: logging.Logger
) -> None:
    """A bar that ended while standard output was redirected sent all that followed to standard error."""
    terminal, output = on_terminal(monkeypatch), io.StringIO()
    monkeypatch.setattr("sys.stdout", output)
    report("trials", 0, 1)
    with redirect_stdout(io.StringIO()):
        report("trials", 1, 1)
    print("the table")
    assert output.getvalue() == "the table\n" and "the table" not in terminal.getvalue()


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch, log: logging.Logger) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    console.log_to_stderr()
    log.warning("a warning")
    assert terminal.getvalue() == "a warning\n"


def test_without_a_terminal_long_work_writes_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: logging.Logger
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    console.log_to_stderr()
    for _ in counted_off(range(30), "removing files"):
        now[0] += 1.0
    log.info("done")
    assert capsys.readouterr().err == "removing files: 10 of 30\nremoving files: 20 of 30\ndone\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_leaves_errors_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: logging.Logger, is_terminal: bool
) -> None:
    terminal = on_terminal(monkeypatch, quiet=True) if is_terminal else None
    if terminal is None:
        console.log_to_stderr(quiet=True)
    report("training", 1, 2)
    log.warning("a warning")
    log.error("an error")
    shown = terminal.getvalue() if terminal is not None else capsys.readouterr().err
    assert "an error" in shown and "warning" not in shown and "training" not in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_and_quiet(name: str) -> None:
    listed = parser_of(name).format_help()
    assert "--json" in listed and "--quiet" in listed


def test_flags_may_stand_on_both_sides_of_a_command_of_banks() -> None:
    for words in (["--json", "list", "x"], ["list", "x", "--json"]):
        options = parser_of("bank").parse_args(words)
        assert options.json and not options.quiet


def test_serve_prints_one_document_where_it_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = {"bank": "b", "url": "http://127.0.0.1:8000", "metrics": ["http://127.0.0.1:9000"]}
    monkeypatch.setattr(endpoint, "serve_forever", lambda config, report: report(ready))
    monkeypatch.setattr(settings, "at_bank", lambda config: config)
    assert run("serve", [str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ready
    assert run("serve", [str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    assert run("serve", [str(tmp_path), "port=9", "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["port"] == 9


def test_a_result_is_one_document_and_notes_are_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = parser_of("plugins").parse_args(["--json"])
    show(options, "text", {"a": 1})
    note(options, "wrote a file")
    out, err = capsys.readouterr()
    assert (out, err) == ('{\n "a": 1\n}\n', "wrote a file\n")
    quiet = parser_of("plugins").parse_args(["--quiet"])
    show(quiet, "text", {"a": 1})
    note(quiet, "wrote a file")
    assert capsys.readouterr() == ("text\n", "")
