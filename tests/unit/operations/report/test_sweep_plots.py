"""Pictures of sweeps say no more than was measured, and hide no trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raycl.operations.report import plots
from raycl.operations.report.sweeps.sweep_plots import parallel_figure, pareto_figure, sensitivity_figure

Settings = dict[str, Any]


def summary_of(*trials: tuple[Settings, list[float]]) -> dict[str, Any]:
    rows = [
        {"number": number, "settings": settings, "scores": scores, "state": "done"}
        for number, (settings, scores) in enumerate(trials)
    ]
    metric = ["ap", "f_ra"][: len(trials[0][1])]
    mode, front = ["max", "min"], list(range(len(rows)))
    paths = list(trials[0][0])
    return {"name": "mine", "paths": paths, "metric": metric, "mode": mode, "front": front, "rows": rows}


def offsets(axes: Axes) -> list[tuple[float, float]]:
    """Return every point of a panel."""
    return [tuple(point) for collection in axes.collections for point in np.asarray(collection.get_offsets()).tolist()]


def test_categories_have_means_but_no_line(tmp_path: Path, drawn: list[Figure]) -> None:
    """Between `lora` and `olora` lies nothing, nor between two seeds."""
    trials = [
        ({"method": name, "seed": seed, "train.learning_rate": rate}, [10.0 * index + seed + rate])
        for index, name in enumerate(("lora", "olora"))
        for seed in (0, 1)
        for rate in (0.1, 0.2)
    ]
    plots.save_png(sensitivity_figure(summary_of(*trials)), tmp_path / "s.png")
    method, seed, rate = drawn[0].axes
    assert not method.lines and not seed.lines and len(rate.lines) == 2, "a line for each method over the rates"
    assert [label.get_text() for label in seed.get_xticklabels()] == ["0", "1"]
    (marks,) = [collection for collection in method.collections if collection.get_label() == "mean"]
    assert np.asarray(marks.get_offsets()).tolist() == [[0, pytest.approx(0.65)], [1, pytest.approx(10.65)]]


def test_settings_that_are_the_same_everywhere_are_named_and_not_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    trials = [({"method.r": 8, "train.learning_rate": rate, "seed": 3}, [rate]) for rate in (0.1, 0.2)]
    plots.save_png(sensitivity_figure(summary_of(*trials)), tmp_path / "s.png")
    plots.save_png(parallel_figure(summary_of(*trials)), tmp_path / "p.png")
    assert [axes.get_xlabel() for axes in drawn[0].axes] == ["train.learning_rate"]
    shown = [label.get_text() for label in drawn[1].axes[0].get_xticklabels()]
    assert shown == ["train.learning_rate", "ap"]
    for figure in drawn:
        assert [text.get_text() for text in figure.texts] == ["the same in all trials: method.r 8, seed 3"]


def test_a_single_trial_has_all_its_axes(tmp_path: Path, drawn: list[Figure]) -> None:
    plots.save_png(sensitivity_figure(summary_of(({"method.r": 8, "seed": 3}, [1.0]))), tmp_path / "s.png")
    assert [axes.get_xlabel() for axes in drawn[0].axes] == ["method.r", "seed"] and not drawn[0].texts


def test_trials_with_equal_values_and_scores_lie_side_by_side(tmp_path: Path, drawn: list[Figure]) -> None:
    trials = [({"method.r": rank, "method": name}, [50.0]) for rank in (4, 8) for name in ("lora", "olora", "slm")]
    plots.save_png(sensitivity_figure(summary_of(*trials)), tmp_path / "s.png")
    rank, method = drawn[0].axes
    for axes in (rank, method):
        points = [point for point in offsets(axes) if point[1] == 50.0]
        assert len(set(points)) == len(points) >= len(trials)
    assert all(min(abs(x - 4), abs(x - 8)) < 0.5 for x, _ in offsets(rank)), "near the value that it stands for"


def test_no_line_of_the_parallel_coordinates_covers_another(tmp_path: Path, drawn: list[Figure]) -> None:
    trials = [({"method.r": rank, "method": name}, [50.0]) for rank in (4, 8) for name in ("lora", "olora") * 2]
    plots.save_png(parallel_figure(summary_of(*trials)), tmp_path / "p.png")
    lines = [line for line in drawn[0].axes[0].lines if len(line.get_ydata()) == 3]
    for index in range(3):
        heights = [float(line.get_ydata()[index]) for line in lines]
        assert len(lines) == len(trials) == len(set(heights))
    ranks = sorted(float(line.get_ydata()[0]) for line in lines)
    assert ranks[3] < 0.1 and ranks[4] > 0.9, "trials of one rank stay together"


def test_points_of_a_front_that_coincide_share_a_name(tmp_path: Path, drawn: list[Figure]) -> None:
    trials = [({"seed": seed}, [70.0, 5.0]) for seed in range(3)] + [({"seed": 3}, [60.0, 1.0])]
    plots.save_png(pareto_figure(summary_of(*trials)), tmp_path / "f.png")
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["4", "1, 2, 3"]


def test_trials_behind_the_front_that_coincide_are_counted(tmp_path: Path, drawn: list[Figure]) -> None:
    trials = [({"seed": seed}, [50.0, 9.0]) for seed in range(2)] + [({"seed": 3}, [60.0, 1.0])]
    plots.save_png(pareto_figure({**summary_of(*trials), "front": [2]}), tmp_path / "f.png")
    assert sorted(text.get_text() for text in drawn[0].axes[0].texts) == ["3", "x 2"]
