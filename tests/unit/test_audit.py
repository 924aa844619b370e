"""`make audit`: pinned versions against an export of advisories; a source without any is no clean result."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import audit
import pytest


def advisory(name: str, *events: dict[str, str], ecosystem: str = "PyPI", **fields: Any) -> dict[str, Any]:
    affected = {"package": {"ecosystem": ecosystem, "name": name}, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
    affected["versions"] = fields.pop("versions", [])
    return {
        "id": "PYSEC-1",
        "modified": "2026-01-02T03:04:05Z",
        "summary": "Reads files",
        "affected": [affected],
        **fields,
    }


def check(tmp_path: Path, pins: str, *advisories: dict[str, Any] | bytes) -> int:
    (tmp_path / "pins.txt").write_text(pins)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for index, item in enumerate(advisories):
            archive.writestr(f"{index}.json", item if isinstance(item, bytes) else json.dumps(item))
    return audit.main([str(tmp_path / "all.zip"), "--requirements", str(tmp_path / "pins.txt")])


FROM_0 = {"introduced": "0"}


@pytest.mark.parametrize(
    ("version", "entry", "affected"),
    [
        ("1.9", advisory("Some_Package", FROM_0, {"fixed": "1.10"}), True),
        ("1.10", advisory("Some_Package", FROM_0, {"fixed": "1.10"}), False),
        ("1.10.0", advisory("some.package", FROM_0, {"fixed": "1.10"}), False),
        ("1.10rc1", advisory("some-package", FROM_0, {"fixed": "1.10"}), True),
        ("2.0", advisory("some-package", {"introduced": "2"}, {"last_affected": "2.0.0"}), True),
        ("2.0.post1", advisory("some-package", {"introduced": "2"}, {"last_affected": "2.0"}), False),
        ("3.5", advisory("some-package", {"fixed": "4"}, {"introduced": "3"}, {"fixed": "2"}, FROM_0), True),
        ("2.5", advisory("some-package", {"fixed": "4"}, {"introduced": "3"}, {"fixed": "2"}, FROM_0), False),
        ("3.5", advisory("some-package", FROM_0, {"limit": "3"}), False),
        ("2.9", advisory("some-package", FROM_0, {"limit": "3"}), True),
        ("1.0", advisory("some-package", versions=["1.0"]), True),
        ("1.1", advisory("some-package", versions=["1.0"]), False),
        ("1.1", advisory("some-package", FROM_0, {"fixed": "2.x-final"}), True),  # cannot be compared
        ("1.0", advisory("some-package", FROM_0, withdrawn="2026-01-01T00:00:00Z"), False),
        ("1.0", advisory("some-package", FROM_0, ecosystem="npm"), False),
        ("1.0", advisory("some-package-2", FROM_0), False),
    ],
)
def test_versions_are_compared_as_osv_says(tmp_path: Path, version: str, entry: dict[str, Any], affected: bool) -> None:
    pins = f"other==1.0\nsome-package=={version}  # a comment\n"
    assert check(tmp_path, pins, entry, advisory("elsewhere", FROM_0)) == (
        audit.VULNERABLE if affected else audit.CLEAN
    )


def test_a_vulnerability_of_two_databases_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = advisory("some-package", FROM_0, {"fixed": "1.2"}, aliases=["CVE-2026-1"], summary="Reads\x1b[2J\nfiles")
    two = advisory("some-package", FROM_0, {"fixed": "1.2"}, id="GHSA-1", aliases=["CVE-2026-1"])
    assert check(tmp_path, "some-package==1.0\nother==2\n", item, two) == audit.VULNERABLE
    assert capsys.readouterr().out.splitlines() == [
        "some-package 1.0: CVE-2026-1, GHSA-1, PYSEC-1; fixed in 1.2; Reads [2J files",
        "2 pinned versions, 2 advisories about packages of PyPI, the newest of 2026-01-02: 1 known vulnerabilities",
    ]


def test_what_is_pinned_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "found.json").write_text(json.dumps({"vulns": [advisory("elsewhere", FROM_0)]}))
    assert audit.main([str(tmp_path / "found.json")]) == audit.CLEAN
    assert f"{len(audit.PINNED.read_text().split())} pinned versions, 1 adv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "has no advisory about packages of PyPI"),
        ([advisory("some-package", FROM_0, ecosystem="npm")], "has no advisory about packages of PyPI"),
        ([advisory("some-package", FROM_0), b"<html>"], "'1.json' is not JSON"),
        ([b"[" * 100_000], "'0.json' is not JSON"),
        ([b" " * (audit.MAX_ADVISORY + 1)], "'0.json' has more than 16,777,216 bytes"),
        ([{"id": "PYSEC-1", "affected": "all"}], "is not in OSV's format: 0.affected: "),
        ([{"name": "no id"}], "is not in OSV's format: 0.id: "),
    ],
)
def test_an_export_that_cannot_be_used_is_no_clean_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: list[Any], reason: str
) -> None:
    assert check(tmp_path, "some-package==1.0\n", *content) == audit.NO_SOURCE
    said = capsys.readouterr()
    assert said.out == "" and reason in said.err
    assert said.err.startswith("make audit: no source of advisories, so nothing was checked: ")


def test_a_missing_and_a_cut_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(tmp_path / "none.zip")]) == audit.NO_SOURCE
    assert "none.zip cannot be read" in capsys.readouterr().err
    check(tmp_path, "some-package==1.0\n", advisory("some-package", FROM_0))
    (tmp_path / "cut.json").write_bytes((tmp_path / "all.zip").read_bytes()[:-30])
    assert audit.main([str(tmp_path / "cut.json")]) == audit.NO_SOURCE


def test_without_a_network_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # the port "discard": nothing listens there
    assert audit.main([]) == audit.NO_SOURCE
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "PyPI has none about jinja2==2.10, which has some" in said and "DB=FILE" in said


@pytest.mark.parametrize("code", [audit.CLEAN, audit.VULNERABLE])
def test_a_source_that_knows_advisories_is_asked_about_what_is_pinned(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The exit code is pip-audit's."""
    known = {"dependencies": [{"name": "jinja2", "version": "2.10", "vulns": [{"id": "PYSEC-2019-217"}]}]}
    asked: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        asked.append([Path(word).read_text() for word in command[-1:]])
        return subprocess.CompletedProcess(command, code, json.dumps(known), "")

    monkeypatch.setattr(audit.subprocess, "run", run)
    assert audit.main([]) == code
    assert asked == [["jinja2==2.10\n"], [audit.PINNED.read_text()]]


def test_a_report_without_vulnerabilities_is_of_no_source() -> None:
    """A mirror that knows packages and no advisories gives such a report."""
    known = {"name": "jinja2", "version": "2.10", "vulns": [{"id": "PYSEC-2019-217"}]}
    assert audit.is_source(json.dumps({"dependencies": [known]}))
    assert not audit.is_source(json.dumps({"dependencies": [{**known, "vulns": []}]}))
    assert not audit.is_source(json.dumps({"dependencies": [{"name": "jinja2", "skip_reason": "not on PyPI"}]}))
    assert not audit.is_source("")
