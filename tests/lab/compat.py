"""`make compat`: raycl's tests with the oldest and with the newest libraries that pyproject.toml allows.

A range of versions is a promise, and one installed set of versions checks one point of it. Needs nothing but Python, so
that it runs with any one (`make compat PYTHON=python3.13`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / ".compat"
ENDS = ("oldest", "newest")

RANGED = ("ray", "transformers", "peft", "sentence-transformers")
"""Libraries of which "oldest" installs the oldest version allowed."""

FREE = ("accelerate", "huggingface-hub", "safetensors", "tokenizers")
"""Packages that those need: pip chooses versions in between."""

TESTS = (
    "tests/unit",
    "tests/golden",
    "tests/contract/test_streams.py",
    "tests/contract/test_learned.py",
    "tests/contract/test_serving_engine.py",
    "tests/integration/test_api.py",
    "tests/ray/test_serve.py",
    "tests/ray/test_submit.py",
    "tests/ray/test_sweep.py",
)
"""Every place where raycl meets Ray or transformers, in about a third of the time of all tests."""

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
SHOWN = ("torch", "ray", "transformers", "peft", "sentence-transformers", "huggingface-hub", "deepspeed", "numpy")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(end: str) -> list[str]:
    """Return lines of pip's constraints.

    Args:
        end: "oldest": constraints.txt, with the lower bounds of `RANGED` as exact versions, and without `FREE`.
            "newest": torch alone is held, since only some versions have a CPU build.
    """
    pinned = (REPO / "constraints.txt").read_text().split()
    if end == "newest":
        return [line for line in pinned if line.startswith("torch==")]
    wanted = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.findall(r"^([\w-]+)(?:\[.*\])?>=([\w.]+)", "\n".join(wanted), re.MULTILINE))
    kept = [line for line in pinned if _canonical(line.partition("==")[0]) not in RANGED + FREE]
    return [*kept, *(f"{name}=={bounds[name]}" for name in RANGED)]


def install(end: str) -> Path:
    """Return the Python of the environment of one end, which is made where it is missing or its constraints have
    changed.

    Raises:
        subprocess.CalledProcessError: pip has failed; its output is in .compat/END-install.log.
    """
    folder = FOLDER / f"{end}-{sys.version_info.major}.{sys.version_info.minor}"
    python, listed, stamp = folder / "bin/python", folder / "constraints.txt", folder / "installed"
    text = "\n".join(constraints(end)) + "\n"
    known = text + (REPO / "pyproject.toml").read_text()
    if end == "newest" or not stamp.is_file() or stamp.read_text() != known:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        listed.write_text(text)
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        with (FOLDER / f"{end}-install.log").open("w") as log:
            subprocess.run(
                [*pip, "-c", listed, "-e", f"{REPO}[dev,docs]"], check=True, env=ENVIRONMENT, stdout=log, stderr=log
            )
        stamp.write_text(known)
    return python


def versions(python: Path) -> str:
    code = f"import importlib.metadata, json; print(json.dumps([importlib.metadata.version(n) for n in {SHOWN}]))"
    tree = json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)
    return ", ".join(f"{name} {version}" for name, version in zip(SHOWN, tree, strict=True))


def check(end: str, tests: list[str], processes: int, say: Callable[[str], None]) -> bool:
    """Return whether the tests of one end pass."""
    started = time.monotonic()
    try:
        python = install(end)
    except subprocess.CalledProcessError:
        say(f"{end}: installing failed, see {FOLDER / f'{end}-install.log'}")
        return False
    say(f"{end}: Python {sys.version.split()[0]}, {versions(python)}")
    say(f"{end}: installed in {time.monotonic() - started:.0f} s; tests: {' '.join(tests)}")
    started, output = time.monotonic(), FOLDER / f"{end}.log"
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-n", str(processes)]
    command += ["--dist", "loadfile", "--no-loadscope-reorder", *tests]
    with output.open("w") as file:
        done = subprocess.run(command, cwd=REPO, env=ENVIRONMENT, stdout=file, stderr=file, check=False)
    lines = output.read_text().splitlines() or ["no output"]
    for line in [*(line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1]]:
        say(f"{end}: {line[:200]}")
    say(f"{end}: exit code {done.returncode} after {time.monotonic() - started:.0f} s; output: {output}")
    return done.returncode == 0


def main() -> int:
    """Run the tests in each environment, and write what came out to .compat/log.txt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ends", nargs="*", metavar="END", help="oldest, newest, or both if none is given")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="'tests' runs all; otherwise a selection")
    parser.add_argument("--processes", type=int, default=2, help="test files at a time")
    options = parser.parse_args()
    if unknown := set(options.ends) - set(ENDS):
        parser.error(f"unknown end {sorted(unknown)}: expected oldest or newest")
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "log.txt").open("w", buffering=1) as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")

        passed = [check(end, options.tests, options.processes, say) for end in options.ends or ENDS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
