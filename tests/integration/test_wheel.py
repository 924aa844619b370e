"""The source archive, the wheel built from it and installed outside the checkout: command, configs, files, metadata.

`make dist` checks both by twine, and installs each with its dependencies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SOURCES = ("raycl", "sweeps", "jobs", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "CITATION.cff")
BUILD = """
import os, sys, tarfile
from pathlib import Path
from setuptools import build_meta
folder = Path(sys.argv[1])
archive = folder / build_meta.build_sdist(folder)
tarfile.open(archive).extractall(folder, filter="data")
os.chdir(folder / archive.name.removesuffix(".tar.gz"))
build_meta.build_wheel(folder)
"""
"""Code that builds the source archive and the wheel in one process, as `pip wheel` does in several."""
COMMANDS = """
import json, sys
from raycl.cli.main import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
    print("----")
"""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for path in (REPO / name for name in SOURCES):  # a copy: building leaves files
        if path.is_dir():
            shutil.copytree(path, sources / path.name, symlinks=True)
        else:
            shutil.copy(path, sources)
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=sources, check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("raycl-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Callable[..., str]:
    """Return what runs a program of an environment that has raycl's wheel, and the libraries of this one."""
    folder = wheel.parent
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    subprocess.run(
        [*PIP, "--python", python, "install", "--no-deps", "--no-compile", "--ignore-installed", wheel],
        check=True,
        env=environment,
    )
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(program: str, *words: str) -> str:
        done = subprocess.run(
            [folder / "venv/bin" / program, *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_installed_command_reads_the_installed_configs(installed: Callable[..., str]) -> None:
    assert installed("raycl", "--help").startswith("usage: raycl ")
    commands = [
        ["train", "jobs/configs/demo.yaml", "--print-config"],
        ["train", "jobs/configs/paper/sapt-lora-long-t5-xl.yaml", "--print-config"],
        ["demo", "--write-skills", "skills"],
    ]
    plain, extending, skills, _ = re.split(
        "^----\n", installed("python", "-I", "-c", COMMANDS, json.dumps(commands)), flags=re.M
    )
    assert "max_source_tokens: 64" in plain
    assert skills.startswith("wrote the rows of shop, teams, orders")
    assert "name: google/t5-v1_1-xl" in extending and "r: 8" in extending and "width: 100" in extending


def test_the_wheel_has_types_and_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert "raycl/py.typed" in names, "mypy takes raycl's types from an installed package that has this file only"
    assert {name.partition("/")[0] for name in names} == {"raycl", metadata.partition("/")[0]}
    assert {f"{metadata.partition('/')[0]}/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= set(names)
    assert text.endswith((REPO / "README.md").read_text()), "what the package index shows"
    for line in (
        "Description-Content-Type: text/markdown",
        "License-Expression: Apache-2.0",
        "Classifier: Typing :: Typed",
        "Requires-Python: >=3.11",
    ):
        assert line in text.splitlines()
