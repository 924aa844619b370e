"""`make audit`: known vulnerabilities of the pinned versions, from PyPI or from an export of advisories.

Pip-audit asks PyPI about each version, and where a mirror or nothing at all answers in its place it speaks of a package
that is not on PyPI, or of no vulnerabilities. Here a version that is known to be vulnerable is asked about first, so
that a source without advisories is not mistaken for a clean result. pip-audit reads no export; `make audit DB=FILE`
compares the pinned versions with one in OSV's format (https://ossf.github.io/osv-schema/), such as the file
PyPI/all.zip that osv.dev publishes. Does not check whether raycl calls the vulnerable code.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

REPO = Path(__file__).resolve().parents[2]
PINNED = REPO / "constraints.txt"
KNOWN = "jinja2==2.10"
"""A version with advisories since 2019: a source that has none about it has none at all."""

MAX_ADVISORY = 16 * 2**20
"""Bytes of one advisory in an export; the longest ones list some thousand versions."""

CLEAN, VULNERABLE, NO_SOURCE = 0, 1, 2
"""Exit codes."""


class NoSourceError(Exception):
    """There are no advisories to compare with."""


class Package(BaseModel):
    """The package that an advisory is about."""

    ecosystem: str = ""
    name: str = ""


class Range(BaseModel):
    """Versions between events: introduced, fixed, last_affected, limit."""

    type: str
    events: list[dict[str, str]]


class Affected(BaseModel):
    """The versions of one package that an advisory is about."""

    package: Package = Package()
    versions: list[str] | None = None
    ranges: list[Range] | None = None


class Advisory(BaseModel):
    """The fields of OSV's format that are compared or printed."""

    id: str
    modified: str = ""
    withdrawn: str | None = None
    aliases: list[str] | None = None
    summary: str | None = None
    details: str | None = None
    affected: list[Affected] | None = None


ADVISORIES = TypeAdapter(list[Advisory])


@dataclass
class Finding:
    """One vulnerability of one pinned version, by all its names."""

    package: str
    version: str
    ids: set[str]
    fixed: set[str]
    summary: str

    def __str__(self) -> str:
        fixed = f"fixed in {', '.join(sorted(self.fixed))}" if self.fixed else "no fixed version is listed"
        line = f"{self.package} {self.version}: {', '.join(sorted(self.ids))}; {fixed}; {self.summary[:120]}"
        return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", line)


def pinned(path: Path) -> dict[str, str]:
    """Return the version by canonical name, of a file of `name==version` lines."""
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line)}


def advisories(path: Path) -> Iterator[Advisory]:
    """Yield the advisories of an export: a zip archive of JSON files, or a JSON file with one, with a list, or with
    `vulns`.

    Raises:
        NoSourceError: the file is neither, or something in it cannot be read.
    """
    try:
        if not zipfile.is_zipfile(path):
            yield from _parsed(path.read_bytes(), str(path))
            return
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.filename.endswith(".json"):
                    continue
                with archive.open(member) as file:
                    text = file.read(MAX_ADVISORY + 1)
                where = f"{path}: {member.filename!r}"
                if len(text) > MAX_ADVISORY:
                    raise NoSourceError(f"{where} has more than {MAX_ADVISORY:,} bytes, too many for one advisory")
                yield from _parsed(text, where)
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise NoSourceError(f"{path} cannot be read ({error})") from error


def _parsed(text: bytes, where: str) -> list[Advisory]:
    try:
        value = from_json(text)
        if isinstance(value, dict):
            value = value.get("vulns", [value])
        return ADVISORIES.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(map(str, first["loc"]))
        raise NoSourceError(f"{where} is not in OSV's format: {setting}: {first['msg']}") from error
    except ValueError as error:
        raise NoSourceError(f"{where} is not JSON ({error})") from error


def compare(versions: dict[str, str], path: Path) -> tuple[list[Finding], int, str]:
    """Return what an export says about pinned versions: findings, number of advisories about PyPI, date of the newest.

    Raises:
        NoSourceError: it cannot be read, or has no advisory about packages of PyPI.
    """
    findings: list[Finding] = []
    count, newest = 0, ""
    for advisory in advisories(path):
        ours = [item for item in advisory.affected or [] if item.package.ecosystem == "PyPI"]
        if advisory.withdrawn or not ours:
            continue
        count, newest = count + 1, max(newest, advisory.modified[:10])
        for affected in ours:
            name = canonicalize_name(affected.package.name)
            if name in versions and is_affected(versions[name], affected):
                _add(findings, name, versions[name], advisory, affected)
    if not count:
        raise NoSourceError(f"{path} has no advisory about packages of PyPI")
    return sorted(findings, key=lambda item: (item.package, sorted(item.ids))), count, newest


def is_affected(version: str, affected: Affected) -> bool:
    """OSV's rule: the version is listed, or in a range. One that cannot be compared counts as affected."""
    if version in (affected.versions or []):
        return True
    try:
        return any(_is_in(Version(version), item.events) for item in affected.ranges or [] if item.type == "ECOSYSTEM")
    except InvalidVersion:
        return True


def _is_in(version: Version, events: list[dict[str, str]]) -> bool:
    """Return whether the last event at or before a version leaves it affected; from a limit on, none is."""
    marks = [(kind, value) for event in events for kind, value in event.items()]
    limits = [value for kind, value in marks if kind == "limit" and value != "*"]
    if limits and not any(version < Version(value) for value in limits):
        return False
    inside = False
    for kind, value in sorted((mark for mark in marks if mark[0] != "limit"), key=lambda mark: _order(mark[1])):
        if kind == "introduced" and version >= _order(value):
            inside = True
        elif (kind == "fixed" and version >= _order(value)) or (kind == "last_affected" and version > _order(value)):
            inside = False
    return inside


def _order(value: str) -> Version:
    """Return a version to compare with; OSV's "0" is before all."""
    return Version("0.dev0" if value == "0" else value)


def _add(findings: list[Finding], name: str, version: str, advisory: Advisory, affected: Affected) -> None:
    """Add a finding, or add to the one that is known under another name: databases copy each other's advisories."""
    ids = {advisory.id, *(advisory.aliases or [])}
    fixed = {value for item in affected.ranges or [] if item.type == "ECOSYSTEM" for value in _fixes(item.events)}
    for known in findings:
        if known.package == name and known.ids & ids:
            known.ids |= ids
            known.fixed |= fixed
            return
    findings.append(Finding(name, version, ids, fixed, advisory.summary or advisory.details or "no description"))


def _fixes(events: list[dict[str, str]]) -> Iterator[str]:
    for event in events:
        if "fixed" in event:
            yield event["fixed"]


def ask_pypi(requirements: Path) -> int:
    """Let pip-audit ask PyPI, after it has found what is known about `KNOWN`.

    Raises:
        NoSourceError: it has not.
    """
    command = [sys.executable, "-m", "pip_audit", "--strict", "--no-deps", "--disable-pip", "--progress-spinner=off"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(KNOWN + "\n")
        file.flush()
        done = subprocess.run([*command, "-f", "json", "-r", file.name], capture_output=True, text=True, check=False)
    if not is_source(done.stdout):
        last = (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
        last = last.rpartition("ERROR:pip_audit._cli:")[2][:160]
        raise NoSourceError(f"PyPI has none about {KNOWN}, which has some (a mirror, or no network?): {last}")
    return subprocess.run([*command, "-r", requirements], check=False).returncode


def is_source(report: str) -> bool:
    """Return whether a JSON report of pip-audit has a vulnerability."""
    try:
        return any(item.get("vulns") for item in json.loads(report)["dependencies"])
    except (ValueError, KeyError):
        return False


def main(words: list[str] | None = None) -> int:
    """Print what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "db", nargs="?", type=Path, metavar="DB", help="an export of advisories; without one PyPI is asked"
    )
    parser.add_argument("-r", "--requirements", type=Path, default=PINNED, help="file of name==version lines")
    options = parser.parse_args(words)
    try:
        if options.db is None:
            return ask_pypi(options.requirements)
        versions = pinned(options.requirements)
        findings, count, newest = compare(versions, options.db)
    except NoSourceError as error:
        print(
            f"make audit: no source of advisories, so nothing was checked: {error}. Name an export in OSV's format: "
            "make audit DB=FILE (osv.dev publishes PyPI/all.zip)",
            file=sys.stderr,
        )
        return NO_SOURCE
    for finding in findings:
        print(finding)
    print(
        f"{len(versions)} pinned versions, {count:,} advisories about packages of PyPI, the newest of "
        f"{newest or 'an unknown date'}: {len(findings)} known vulnerabilities"
    )
    return VULNERABLE if findings else CLEAN


if __name__ == "__main__":
    sys.exit(main())
