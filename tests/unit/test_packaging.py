"""pyproject.toml, constraints.txt, CITATION.cff, the changelog and the table of extras agree with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import compat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import raycl

REPO = Path(__file__).resolve().parents[2]


def versions(lines: list[str]) -> dict[str, str]:
    """Version by canonical name, of lines of constraints."""
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
PINNED = versions((REPO / "constraints.txt").read_text().split())
WANTED = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}


@pytest.mark.parametrize("wanted", [*WANTED, *EXTRAS["dev"], *EXTRAS["docs"]], ids=lambda wanted: wanted.name)
def test_pinned_versions_are_in_their_range(wanted: Requirement) -> None:
    assert PINNED[canonicalize_name(wanted.name)] in wanted.specifier


def test_compat_installs_the_lower_bounds_and_the_newest() -> None:
    oldest = versions(compat.constraints("oldest"))
    for wanted in WANTED:
        if wanted.name in compat.RANGED:
            assert f">={oldest[wanted.name]}" in str(wanted.specifier)
        elif canonicalize_name(wanted.name) not in compat.FREE:
            name = canonicalize_name(wanted.name)
            assert oldest[name] == PINNED[name]
    assert set(compat.RANGED) <= {wanted.name for wanted in WANTED}
    assert compat.constraints("newest") == [f"torch=={PINNED['torch']}"]


def test_compats_tests_exist() -> None:
    assert [path for path in compat.TESTS if not (REPO / path).exists()] == []


def test_the_citation_names_this_version() -> None:
    """Its schema, version 1.2.0, requires the first four; `cffconvert --validate` checks it in full."""
    cited = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["message"] and cited["title"] and cited["authors"]
    assert all("name" in author or "family-names" in author for author in cited["authors"])
    assert (cited["version"], cited["license"]) == (raycl.__version__, PROJECT["license"])


def test_the_changelog_has_this_version() -> None:
    assert re.search(rf"^## {re.escape(raycl.__version__)}\b", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_table_of_extras_has_each_once() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (REPO / "docs/index.md").read_text(), re.MULTILINE)
    assert rows == list(EXTRAS)
