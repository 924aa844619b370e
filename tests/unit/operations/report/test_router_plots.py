"""Pictures of routers: readable for one task and for many, drawn from the right numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from raycl.errors import RunError
from raycl.operations.report import plots
from raycl.operations.report.router_plots import MOST_RUNS, MOST_TASKS, confusion_figure, ood_figure, router_figure
from raycl.operations.report.tables import confusion_table, ood_table
from raycl.text_tables import render

Make = Callable[..., dict[str, Any]]
TASKS = ["agnews", "dbpedia", "yahoo"]


def panels(figure: Figure, run: int = 0) -> tuple[Axes, Axes, Axes]:
    """Return heat map, plane and bars of a run; between the first two stands the colour scale."""
    heat, _scale, plane, bars = figure.axes[4 * run : 4 * run + 4]
    return heat, plane, bars


def names(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def points(plane: Axes) -> list[PathCollection]:
    return [artist for artist in plane.collections if isinstance(artist, PathCollection)]


def test_the_heat_map_has_every_slot_and_a_border_between_tasks(
    tmp_path: Path, make_routed: Make, drawn: list[Figure]
) -> None:
    result = make_routed(TASKS)
    path = plots.save_png(router_figure([result]), tmp_path / "new" / "router.png")
    assert imread(path).shape[0] > 500 and imread(path).shape[1] > 1500
    heat, _, _ = panels(drawn[0])
    cells = np.asarray(heat.images[0].get_array())
    assert cells.shape == (12, 12) and np.array_equal(cells, cells.T)
    for phase, summary in enumerate(result["phase_summaries"]):
        rows = np.array(summary["slot_similarity"])
        assert np.array_equal(cells[4 * phase : 4 * phase + 4, : rows.shape[1]], rows)
    assert [line.get_ydata()[0] for line in heat.lines if line.get_ydata()[0] == line.get_ydata()[1]] == [3.5, 7.5]
    assert names(heat) == TASKS and heat.get_yticks().tolist() == [1.5, 5.5, 9.5]


def test_the_plane_has_every_key_with_its_task(make_routed: Make) -> None:
    many = [f"t{number}" for number in range(27)]
    result = make_routed(many)
    figure = router_figure([result])
    _, plane, _ = panels(figure)
    groups = points(plane)
    assert [group.get_label() for group in groups] == many
    for task, group in zip(many, groups, strict=True):
        places = [
            [point["x"], point["y"]]
            for point in result["phase_summaries"][-1]["key_plane"]
            if point["slot"].partition(".")[0] == task
        ]
        assert np.asarray(group.get_offsets()).tolist() == places and len(places) == 4 * 6
    looks = {(to_hex(group.get_facecolor()[0]), group.get_paths()[0].vertices.tobytes()) for group in groups}
    assert len(looks) == 27, "no two tasks look alike"


def test_a_missing_projection_is_noted(make_routed: Make) -> None:
    result = make_routed(TASKS)
    result["phase_summaries"][-1]["key_plane"] = []
    figure = router_figure([result])
    _, plane, _ = panels(figure)
    assert [text.get_text() for text in plane.texts] == ["left out: too few keys, or too many"]
    assert plane.get_legend() is None


def test_bars_are_the_shares_of_each_task(make_routed: Make) -> None:
    result = make_routed(TASKS, router="keys")
    outcome = result["phase_summaries"][-1]["own_shares"]
    del outcome["eq13"]["dbpedia"]
    figure = router_figure([result])
    _, _, axes = panels(figure)
    shares = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert shares[:2] == [list(outcome["keys"].values()), list(outcome["discriminant"].values())]
    assert shares[2] == pytest.approx([outcome["eq13"]["agnews"], np.nan, outcome["eq13"]["yahoo"]], nan_ok=True)
    tops = [bars[0].get_y() for bars in axes.containers]
    assert names(axes) == TASKS and tops == sorted(tops) and axes.yaxis_inverted()
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text().partition(":")[0] for text in legend.texts] == ["keys (in use)", "discriminant", "eq. 13"]
    assert f"{outcome['keys']['agnews']:.1f}" in [text.get_text() for text in axes.texts]


def test_rows_of_the_confusion_are_in_the_order_of_its_columns(make_routed: Make) -> None:
    """A record has them by name."""
    tasks = ["yahoo", "dbpedia", "agnews"]
    result = json.loads(json.dumps(make_routed(tasks), sort_keys=True))
    axes = confusion_figure([result]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == tasks
    assert [label.get_text() for label in axes.get_xticklabels()] == tasks


def test_scores_are_drawn_beside_those_before_the_task_was_learned_and_the_threshold(make_routed: Make) -> None:
    result = make_routed(TASKS)
    result["config"]["eval"] = {"false_alarms": 0.05}
    (axes,) = ood_figure([result]).axes
    assert names(axes) == TASKS
    drawn = {(label, tuple(map(float, line.get_xdata()))) for line in axes.lines if (label := line.get_label())}
    medians = sorted(float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o")
    assert medians == pytest.approx([0.45, 0.46, 0.47]) and ("learned", (0.45,)) in drawn
    assert ("before it was learned", (1.0,)) in drawn and ("mean before it was learned", (0.9375, 0.9375)) in drawn
    assert ("threshold (0.05 false alarms)", (184 / 192, 184 / 192)) in drawn, "of 193 texts 9 are above it"
    ends = [[*line.get_xdata()] for line in axes.lines if line.get_linewidth() == 1 and len(line.get_xdata()) == 2]
    assert ends.count([0.04, 0.93]) == 3 and ends.count([0.6, 1.0]) == 2
    rows = [line.split() for line in render(ood_table(result)).splitlines()]
    assert ["agnews", "learned", "0.040", "0.200", "0.450", "0.700", "0.930"] in rows
    before = ["dbpedia", *["before", "it", "was", "learned"], *["0.600", "0.900", "1.000", "1.000", "1.000", "0.938"]]
    assert before in rows and "from 0.958 on a text counts" in render(ood_table(result))
    result["config"]["eval"] = {"false_alarms": 0.001}
    assert "no threshold: too few kept dev texts" in render(ood_table(result))
    assert not [line for line in ood_figure([result]).axes[0].lines if "threshold" in str(line.get_label())]


def test_panels_of_scores_fit_a_phone_and_keep_apart(make_routed: Make) -> None:
    results = [make_routed([f"task{number}_some_long_name" for number in range(4)], seed=seed) for seed in (0, 1)]
    results[1]["config"]["method"]["router"] = "keys"
    width = ood_figure(results[:1]).get_tightbbox().width
    assert 96 * (width + 0.2) <= 320, "of 390 pixels of a phone a picture has 320, with its margins"
    figure = ood_figure(results)
    figure.draw_without_rendering()
    tight = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(item.overlaps(other) for item, other in pairwise(tight) if item and other)


def test_the_confusion_is_that_of_the_router_that_chose(make_routed: Make) -> None:
    result = make_routed(TASKS, router="keys")
    result["phase_summaries"][-1]["confusion"]["discriminant"]["yahoo"] = {"yahoo": 100.0}
    axes = confusion_figure([result]).axes[0]
    cells = np.asarray(axes.images[0].get_array())
    assert cells.tolist() == [[100, 0, 0], [25, 75, 0], [25, 0, 75]]
    assert names(axes) == TASKS and [text.get_text() for text in axes.get_xticklabels()] == TASKS
    rows = [line.split() for line in render(confusion_table(result)).splitlines()]
    assert ["yahoo", "25.0", "0.0", "75.0"] in rows


@pytest.mark.parametrize("count", [3, 27])
def test_a_task_without_dev_texts_is_noted(make_routed: Make, count: int) -> None:
    """A blank row may as well mean that no text found its task: that row has the number, however thin."""
    tasks = [f"t{number}" for number in range(count)]
    result = make_routed(tasks)
    outcome = result["phase_summaries"][-1]["own_shares"]
    for shares in outcome.values():
        del shares["t1"]
        shares["t2"] = 0.0
    figure = router_figure([result])
    _, _, axes = panels(figure)
    notes = {round(text.get_position()[1]): text.get_text() for text in axes.texts if "dev texts" in text.get_text()}
    assert notes == ({1: "no dev texts"} if count == 3 else {1: "no dev texts", 2: "0.0 of its dev texts"})


@pytest.mark.parametrize("count", [1, 27])
def test_panels_keep_apart_for_few_tasks_and_for_many(make_routed: Make, count: int) -> None:
    """No name, title or legend lies on another panel or on its neighbour."""
    tasks = [f"task{1000 + number}_some_long_name" for number in range(count)]
    figure = router_figure([make_routed(tasks), make_routed(tasks[:1], seed=1)])
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.get_yticklabels() if label.get_text()]
        assert not any(item.overlaps(other) for item, other in pairwise(boxes))
    tight = [axes.get_tightbbox() for axes in figure.axes]
    apart = [item.overlaps(other) for i, item in enumerate(tight) for other in tight[i + 1 :] if item and other]
    assert not any(apart)


def test_runs_stand_below_each_other_on_one_scale(make_routed: Make) -> None:
    first, second = make_routed(TASKS), make_routed(TASKS, router="keys")
    second["config"]["method"]["router"] = "keys"
    figure = router_figure([first, second])
    figure.draw_without_rendering()
    (upper, *_), (lower, *_) = panels(figure, 0), panels(figure, 1)
    assert upper.get_position().y0 > lower.get_position().y1
    assert upper.images[0].get_clim() == lower.images[0].get_clim()
    assert [text.get_text() for text in figure.texts] == [
        "slm on long-a, mini-t5, seed 0",
        "slm on long-a, mini-t5, seed 0 (method.router=keys)",
    ]


def test_impossible_plots_are_refused(tmp_path: Path, make_routed: Make) -> None:
    path = tmp_path / "no.png"
    with pytest.raises(RunError, match=f"a picture of {MOST_RUNS + 1} routers cannot be read: .* and {MOST_RUNS} runs"):
        plots.save_png(router_figure([make_routed(TASKS)] * (MOST_RUNS + 1)), path)
    with pytest.raises(RunError, match=f"over {MOST_TASKS + 1} tasks cannot be read"):
        plots.save_png(router_figure([make_routed([f"t{number}" for number in range(MOST_TASKS + 1)], slots=1)]), path)
    assert not path.exists()
