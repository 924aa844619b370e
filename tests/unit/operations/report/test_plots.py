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
from raycl.operations.report.plots import MOST_PANELS, matrix_figure

Make = Callable[..., dict[str, Any]]


def test_names_with_dollars_are_no_formulas(tmp_path: Path, make_result: Make) -> None:
    result = make_result("$x_$")
    result["stream"]["tasks"] = result["phases"] = ["$x_$", "a$\\frac$", "c"]
    assert plots.save_png(matrix_figure([result]), tmp_path / "matrix.png").is_file()


def test_heatmap_writes_scores_and_leaves_the_rest_blank(
    tmp_path: Path, make_result: Make, drawn: list[Figure]
) -> None:
    path = plots.save_png(matrix_figure([make_result()]), tmp_path / "new" / "matrix.png")
    assert path.is_file() and imread(path).shape[0] > 200
    axes = drawn[0].axes[0]
    assert [text.get_text() for text in axes.texts] == ["90.0", "80.0", "85.0", "70.0", "80.0", "95.0"]
    assert axes.get_title(loc="left") == "sapt on long-a, mini-t5, seed 0\nAP 81.7   F.Ra 12.5"


def test_heatmaps_share_one_picture(tmp_path: Path, make_result: Make, drawn: list[Figure]) -> None:
    joint = make_result("joint") | {"phases": ["joint"], "metrics": {"ap": 81.7}}
    joint["matrix"] = joint["matrix"][-1:]
    plots.save_png(matrix_figure([make_result(), joint]), tmp_path / "both.png")
    _first, second, _bar = drawn[0].axes
    assert second.get_title(loc="left").endswith("\nAP 81.7")


@pytest.mark.parametrize("runs", [0, MOST_PANELS + 1])
def test_plots_too_large_to_read_are_refused(tmp_path: Path, make_result: Make, runs: int) -> None:
    with pytest.raises(RunError, match=f"a picture of {runs} settings"):
        plots.save_png(matrix_figure([make_result(f"method-{number}") for number in range(runs)]), tmp_path / "no.png")


def test_seeds_have_one_matrix_of_means(tmp_path: Path, make_result: Make, drawn: list[Figure]) -> None:
    other = make_result(seed=1, ap=83.667)
    other["matrix"][0][0]["value"] = 92.0
    plots.save_png(matrix_figure([make_result(), other]), tmp_path / "means.png")
    axes, _bar = drawn[0].axes
    assert [text.get_text() for text in axes.texts][:2] == ["91.0\n± 1.4", "80.0\n± 0.0"]
    assert axes.get_title(loc="left") == "sapt on long-a, mini-t5, seeds 0, 1\nAP 82.7 ± 1.4   F.Ra 12.5 ± 0.0"


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_the_picture_is_at_most_twice_as_wide_as_high_and_the_reverse(
    tmp_path: Path, make_result: Make, runs: int
) -> None:
    results = [make_result(f"method-{number}") for number in range(runs)]
    for result in results:
        result |= {"phases": ["joint"], "matrix": result["matrix"][-1:]}
    height, width = imread(plots.save_png(matrix_figure(results), tmp_path / "matrix.png")).shape[:2]
    assert 0.49 <= width / height <= 2.02


@pytest.mark.parametrize("tasks", [2, 5, 15])
def test_panels_are_arranged_in_rows_of_a_readable_shape(tasks: int) -> None:
    for runs in range(3, MOST_PANELS + 1):
        wide, high = plots.MARGIN + 0.56 * max(tasks, 4), 2.2 + 0.42 * tasks
        figure, corners = plots.arranged([(wide, high)] * runs, 1.0)
        width, height = figure.get_size_inches()
        assert 0.5 <= width / height <= 2 and len(set(corners)) == runs
        right, below = (max(places) for places in zip(*corners, strict=True))
        assert right + wide < width and below + high <= height + 0.01


def test_panels_are_arranged_in_a_given_width() -> None:
    for runs in (1, 5, 40):
        figure, corners = plots.arranged([(3.5, 3.0)] * runs, 1.0, 11.7)
        assert figure.get_figwidth() <= 11.7 and len(set(corners)) == runs
    assert plots.arranged([(20.0, 3.0)] * 2, 1.0, 11.7)[0].get_figwidth() == 21.0, (
        "one panel that is wider stands alone"
    )


@pytest.mark.parametrize(("size", "shape"), [((12, 1), 2.0), ((1, 12), 0.5), ((3, 2), 1.5)])
def test_a_picture_that_one_panel_stretches_has_margins(
    size: tuple[float, float], shape: float, tmp_path: Path
) -> None:
    figure = plots.new_figure(*size)
    figure.text(0.01, 0.01, "left")
    figure.text(0.99, 0.99, "right", ha="right", va="top")
    height, width = imread(plots.save_png(figure, tmp_path / "picture.png")).shape[:2]
    assert width / height == pytest.approx(shape, rel=0.1)


def test_ink_is_readable_on_its_cell() -> None:
    assert (plots._ink(0), plots._ink(100)) == ("white", plots.DARK)
