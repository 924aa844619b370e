"""The package of `docs/extending`: its files as the pages print them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs" / "extending"
FILE = re.compile(r'^```\w+ title="((?:my_raycl|tests)/\w+\.py|pyproject\.toml)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def write_recipes(folder: Path) -> Path:
    """Write the files of all recipes into a folder, as one package."""
    files = [match for page in sorted(PAGES.glob("*.md")) for match in FILE.findall(page.read_text())]
    assert len({name for name, _ in files}) == len(files) == 10, sorted(name for name, _ in files)
    for name, text in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def installed_recipes(folder: Path) -> Path:
    """Build the package and install it into a folder, which is returned; nothing is fetched."""
    source, site = write_recipes(folder / "my-raycl"), folder / "site"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--target", str(site)]
    given = ["--no-build-isolation", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, *given, str(source)], check=True)
    return site
