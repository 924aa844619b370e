"""Pictures are written, and drawn from the right numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from raycl.errors import RunError
from raycl.operations.report import plots
from raycl.operations.report.plots import MOST_PANELS, heatmaps

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures behind the files written in a test."""
    figures: list[Figure] = []
    save = plots.save_png

    def keep(figure: Figure, path: str | Path) -> Path:
        figures.append(figure)
        return save(figure, path)

    monkeypatch.setattr(plots, "save_png", keep)
    return figures


def test_names_with_dollars_are_no_formulas(tmp_path: Path, make_result: Make) -> None:
    result = make_result("$x_$")
    result["stream"]["tasks"] = result["phases"] = ["$x_$", "a$\\frac$", "c"]
    assert heatmaps([result], tmp_path / "matrix.png").is_file()


def test_heatmap_writes_scores_and_leaves_the_rest_blank(
    tmp_path: Path, make_result: Make, drawn: list[Figure]
) -> None:
    path = heatmaps([make_result()], tmp_path / "new" / "matrix.png")
    assert path.is_file() and imread(path).shape[0] > 200
    axes = drawn[0].axes[0]
    assert [text.get_text() for text in axes.texts] == ["90.0", "80.0", "85.0", "70.0", "80.0", "95.0"]
    assert axes.get_title(loc="left") == "sapt on long-a, mini-t5, seed 0\nAP 81.7   F.Ra 12.5"


def test_heatmaps_share_one_picture(tmp_path: Path, make_result: Make, drawn: list[Figure]) -> None:
    joint = make_result("joint") | {"phases": ["joint"], "metrics": {"ap": 81.7}}
    joint["matrix"] = joint["matrix"][-1:]
    heatmaps([make_result(), joint], tmp_path / "both.png")
    first, second, _bar = drawn[0].axes
    assert first.get_position().y1 == pytest.approx(second.get_position().y1)
    assert second.get_title(loc="left").endswith("\nAP 81.7")


@pytest.mark.parametrize("runs", [0, MOST_PANELS + 1])
def test_plots_too_large_to_read_are_refused(tmp_path: Path, make_result: Make, runs: int) -> None:
    with pytest.raises(RunError, match=f"a picture of {runs} runs"):
        heatmaps([make_result()] * runs, tmp_path / "no.png")


def test_ink_is_readable_on_its_cell() -> None:
    assert (plots._ink(0), plots._ink(100)) == ("white", "black")
