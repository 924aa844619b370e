"""`make docs-run`: every tutorial does what it says, typed as it is printed, and the notebook's outputs are of today.

It is no part of `make test`: models are trained as a reader trains them, for about nine minutes on two cores.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from tutorial_page import FOLDER, run_page

TUTORIALS = Path(__file__).resolve().parents[2] / "docs/tutorials"
NOTEBOOK = TUTORIALS / "from-python.ipynb"
CHAT_MODEL = "smollm2"
"""The folder of a model that a page downloads."""
pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if CHAT_MODEL in page.read_text():
        model = request.getfixturevalue("shared") / "models/smollm2-135m"
        if not (model / "model.safetensors").is_file():
            pytest.skip(f"no chat model in {model}")
        (tmp_path / CHAT_MODEL).symlink_to(model)
    run_page(page, tmp_path)


def test_the_notebook_runs_and_its_outputs_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        for output in cell.get("outputs", []):
            _as_of_a_reader(output, str(tmp_path))
        if "outputs" in cell:  # without warnings of libraries, on widgets that are not installed
            cell.outputs = [item for item in cell.outputs if item.get("name") != "stderr" and item.get("text") != ""]
    notebook.metadata.get("language_info", {}).pop("version", None)
    nbformat.write(notebook, NOTEBOOK)


def _as_of_a_reader(output: Any, folder: str) -> None:
    """The folder is called as in the other tutorials; without log lines of libraries and terminal colours."""
    texts = output.get("data", output)
    for key in ("text", "text/plain", "text/html"):
        if key in texts:
            plain = re.sub(r"\x1b\[[0-9;]*m|^\[INFO\].*\n", "", texts[key], flags=re.MULTILINE)
            texts[key] = plain.replace(folder, FOLDER)
