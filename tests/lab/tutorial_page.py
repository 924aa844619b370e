"""A tutorial, run as it is printed: its files are written, its commands executed, and what they print is compared.

A page's fenced blocks mean:

- `sh`: commands, executed one block after another by bash in one folder; a block must end with status 0. A line that
  ends with `&` is a server: it is started, and the next line waits until the address that it prints answers.
- any language with `title="NAME"`: the content of that file.
- `text`, directly behind an `sh` block: lines of what the block prints on standard output, in their order. `...` in a
  line stands for anything. Scores and probabilities may differ a little (other processors), times and hashes entirely,
  and the folder that the reader works in is called `/home/you`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER = "/home/you"
POINTS, SHARE = 10.0, 0.2
"""Most that a score (up to two digits behind the point) and a probability (more digits) may differ by."""
NUMBER = re.compile(r"[+-]?\d+\.\d+")
VARIABLE = re.compile(r"\b(?:[0-9a-f]{12,64}|\d+:\d\d(?::\d\d)?|20\d\d-\d\d-\d\d|chatcmpl-\w+)\b")
START_S = 120.0


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it is the content of, its text, and its first line in the page."""

    language: str
    file: str | None
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    """Return the blocks that are run, written or compared, in their order."""
    return [
        Block(match[1], match[2], match[3], page.count("\n", 0, match.start()) + 1)
        for match in BLOCK.finditer(page)
        if match[2] or match[1] in ("sh", "text")
    ]


def run_page(page: Path, folder: Path) -> None:
    """Do everything that the page says, in an empty folder.

    Raises:
        AssertionError: a command fails, or what it prints is not what the page says.
    """
    printed = ""
    with _servers(folder) as start:
        for block in blocks(page.read_text()):
            where = f"{page.name}, line {block.line}"
            if block.file:
                (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file).write_text(block.text)
            elif block.language == "sh":
                begun = time.monotonic()
                printed = "".join(_run(commands, folder, where, start) for commands in _parts(block.text))
                print(f"{where}: {time.monotonic() - begun:.0f} s\n{printed}", flush=True)
            else:
                missing = first_missing(block.text, printed)
                assert missing is None, f"{where}: '{missing}' is not (or not in this order) in what is printed"


def first_missing(expected: str, printed: str) -> str | None:
    """Return the first line of a page's output that what was printed does not have behind the lines before it; None:
    none."""
    left = iter(printed.splitlines())
    for line in expected.splitlines():
        if line.strip() not in ("", "...") and not any(same(line, other) for other in left):
            return line
    return None


def same(expected: str, printed: str) -> bool:
    """Return whether a printed line is the expected one, but for what differs from machine to machine."""
    places = [_pattern(part) for part in expected.split("...")]
    match = re.fullmatch(r"\s*" + ".*?".join(places) + r"\s*", VARIABLE.sub("#", printed))
    if match is None:
        return False
    wanted = [value for part in expected.split("...") for value in NUMBER.findall(VARIABLE.sub("#", part))]
    return all(_near(item, other) for item, other in zip(wanted, match.groups(), strict=True))


def _pattern(part: str) -> str:
    words = NUMBER.split(VARIABLE.sub("#", part))
    return r"([+-]?\d+\.\d+)".join(r"\s+".join(map(re.escape, re.split(r"\s+", text.strip("\n")))) for text in words)


def _near(wanted: str, result: str) -> bool:
    most = POINTS if len(wanted.partition(".")[2]) < 3 else SHARE
    return abs(float(wanted) - float(result)) <= most


def _parts(text: str) -> Iterator[str]:
    """Yield the block's lines, those before, of and behind a server apart."""
    gathered: list[str] = []
    for line in text.splitlines():
        if line.endswith(" &"):
            yield from filter(None, ["\n".join(gathered)])
            yield line
            gathered = []
        else:
            gathered.append(line)
    yield from filter(None, ["\n".join(gathered)])


def _run(commands: str, folder: Path, where: str, start: _Servers) -> str:
    if commands.endswith(" &"):
        start(commands.removesuffix(" &"))
        return ""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=folder, env=_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{where}: status {done.returncode} of\n{commands}\n{done.stdout}{done.stderr}"
    return done.stdout.replace(str(folder), FOLDER)


def _environment() -> dict[str, str]:
    """Return a reader's with the environment of this interpreter, and no Ray cluster."""
    kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "COLUMNS": "120"}


class _Servers:
    """Servers that a page starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self, command: str) -> None:
        log = self.folder / f"server{len(self.started)}.log"
        with log.open("wb") as said:
            # exec: the process that is started, and later ended, is the server and no shell around it
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.folder, env=_environment(), stdout=said, stderr=said
            )
        self.started.append(process)
        end = time.monotonic() + START_S
        while not _answers(log.read_text()):
            assert process.poll() is None, f"'{command}' ended with status {process.returncode}: {log.read_text()}"
            assert time.monotonic() < end, f"'{command}' does not answer after {START_S:.0f} s: {log.read_text()}"
            time.sleep(0.5)

    def stop(self) -> None:
        """End them as Ctrl-C does."""
        for process in self.started:
            process.send_signal(signal.SIGINT)
        for process in self.started:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _servers(folder: Path) -> Iterator[_Servers]:
    made = _Servers(folder)
    try:
        yield made
    finally:
        made.stop()


def _answers(log: str) -> bool:
    """Return whether the address that a server printed answers."""
    match = re.search(r"http://127\.0\.0\.1:\d+", log)
    if match is None:
        return False
    try:
        with urllib.request.urlopen(match[0], timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
