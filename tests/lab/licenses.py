"""`make licenses`: the table of the licenses of everything in constraints.txt, by pip-licenses, in docs/licenses.md.

Who installs raycl, or passes on an image with it, wants to know under which terms, and a list by hand is soon wrong.
Does not check whether a package's author named the right license, or what is installed beyond constraints.txt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs/licenses.md"
HEAD = """\
# Licenses

raycl is under Apache 2.0. This table has the license of every package in `constraints.txt`, as the package itself names
it: what raycl requires and what its tests and tools do. `make licenses` writes it anew (by pip-licenses). `NOTICE` says
what is left out, and what images and CUDA builds of torch bring beside these.

| package | version | license |
|---|---|---|
"""


def pinned() -> dict[str, tuple[str, str]]:
    """Return the name and version by canonical name, of constraints.txt."""
    lines = (line.split("==") for line in (REPO / "constraints.txt").read_text().split())
    return {canonicalize_name(name): (name, version) for name, version in lines}


def installed(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return version and license by canonical name, of those that are installed."""
    command = [sys.executable, "-m", "piplicenses", "--format=json", "--with-system", "--packages", *names]
    tree = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {canonicalize_name(item["Name"]): (item["Version"].partition("+")[0], item["License"]) for item in tree}


def row(name: str, version: str, license: str) -> str:
    """Return a line of the table."""
    first = license.partition("\n")[0]  # some packages have the whole text there
    return f"| {name} | {version} | {first.replace('|', '/')} |"


def rows(page: str) -> dict[str, str]:
    """Return the line of the table by canonical name."""
    matches = re.finditer(r"^\| (\S+) \| \S+ \| .+ \|$", page, re.MULTILINE)
    return {canonicalize_name(item[1]): item[0] for item in matches if item[1] != "package"}


def main() -> int:
    """Write the table, if all that is pinned is installed."""
    wanted = pinned()
    result = installed(name for name, _ in wanted.values())
    missing = [name for name, (_, version) in wanted.items() if result.get(name, ("",))[0] != version]
    if missing:
        print(f"make licenses: not installed as pinned: {', '.join(missing)}; install them and repeat", file=sys.stderr)
        return 1
    lines = [row(*wanted[name], result[name][1]) for name in sorted(wanted)]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
