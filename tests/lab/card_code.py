"""Runs the code of exported folders' cards in a process of its own, where raycl cannot be imported."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path


def main(folders: list[str], texts: list[str], file: Path) -> None:
    """Write for each folder: text -> what its card's lines print about it; its own example first, then `texts`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "raycl"]:
        del sys.modules[name]
    sys.modules["raycl"] = None  # type: ignore[assignment]  # importing it fails
    collected: list[dict[str, str]] = []
    for folder in folders:
        os.chdir(folder)
        (code,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.S)
        (line,) = re.findall(r'^text = ".*"$', code, re.M)
        collected.append({})
        for text in [json.loads(line.removeprefix("text = ")), *texts]:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code.replace(line, f"text = {json.dumps(text)}"), {})
            collected[-1][text] = out.getvalue()
    file.write_text(json.dumps(collected))
