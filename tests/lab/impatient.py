"""Processes that run what others wrote, ended after less processor time than the product gives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from raycl.backbone.markup.rendering import renderer

RENDERING_S = 0.3
"""Seconds for a chat template: what loops takes all of them, and what does not takes some milliseconds."""


@contextmanager
def impatient(program: ModuleType, seconds: float, folder: Path) -> Iterator[None]:
    """While it is entered, processes of this program get these seconds as their `CPU_S`; all else is the product's.

    Args:
        program: module that is started as a file. folder: where its copy is written.
    """
    source, line = Path(program.__file__ or "").read_text(), f"\nCPU_S = {program.CPU_S}\n"
    assert source.count(line) == 1, f"{program.__name__} has its limit in another line"
    file = folder / "program.py"
    file.write_text(source.replace(line, f"\nCPU_S = {seconds}\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "__file__", str(file))
        patch.setattr(program, "CPU_S", seconds)
        renderer().close()  # which an earlier test has started
        try:
            yield
        finally:
            renderer().close()
