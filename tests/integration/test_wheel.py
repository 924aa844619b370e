"""The wheel, installed outside the checkout: the command, its configs, and files that code reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SOURCES = ("raycl", "sweeps", "jobs", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def raycl(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs the command of an environment that has raycl's wheel, and the libraries of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for path in (REPO / name for name in SOURCES):  # a copy: building leaves files
        if path.is_dir():
            shutil.copytree(path, sources / path.name, symlinks=True)
        else:
            shutil.copy(path, sources)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sources], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    (wheel,) = folder.glob("raycl-*.whl")
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", "--ignore-installed", wheel], check=True, env=environment
    )
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*words: str) -> str:
        done = subprocess.run(
            [folder / "venv/bin/raycl", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_installed_command_reads_the_installed_configs(raycl: Callable[..., str]) -> None:
    assert raycl("--help").startswith("usage: raycl ")
    assert "max_source_tokens: 64" in raycl("train", "jobs/configs/demo.yaml", "--print-config")
