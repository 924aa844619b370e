"""Sizes of the code: lines by package, the largest files, functions and folders. `make check` prints them.

The numbers are for people to judge; no test fails on them.
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from pathlib import Path

LARGEST = 5


def functions(path: Path) -> list[tuple[int, str]]:
    """Return lines and name of each function of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}:{node.name}") for node in defined]


def table(root: Path) -> str:
    """Return the numbers of all Python files below a folder."""
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in sorted(root.rglob("*.py"))}
    packages, folders = Counter[str](), Counter[str]()
    for path, count in lines.items():
        below = path.relative_to(root)
        packages[below.parts[0] if len(below.parts) > 1 else "(modules)"] += count
        folders[str(path.parent)] += path.name != "__init__.py"
    every = sorted((entry for path in lines for entry in functions(path)), reverse=True)
    largest = sorted(((count, str(path)) for path, count in lines.items()), reverse=True)
    median = statistics.median(lines.values()), statistics.median(count for count, _ in every)
    return "\n".join(
        [
            f"{root}: {sum(lines.values()):,} lines in {len(lines)} files, median file {median[0]:g} lines, "
            f"median function {median[1]:g}",
            "packages: " + ", ".join(f"{name} {count:,}" for name, count in packages.most_common()),
            "largest files: " + ", ".join(f"{name} {count}" for count, name in largest[:LARGEST]),
            "longest functions: " + ", ".join(f"{name} {count}" for count, name in every[:LARGEST]),
            "most modules: " + ", ".join(f"{name} {count}" for name, count in folders.most_common(LARGEST)),
        ]
    )


if __name__ == "__main__":
    for folder in ("raycl", "benchmarks"):
        print(table(Path(folder)))
