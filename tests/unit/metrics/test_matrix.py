"""The numbers of an accuracy matrix: the worked example, their relations, their gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycl.metrics.matrix import AccuracyMatrix, Values, ap, bwt, bwt_m, f_ra, f_t, fwt, summary
from raycl.types import Score

WORKED = [[90.0], [80.0, 85.0], [70.0, 80.0, 95.0]]
SINGLES = {"t0": 88.0, "t1": 86.0, "t2": 93.0}


def matrix_of(rows: list[list[float]], counts: list[int] | None = None) -> AccuracyMatrix:
    """Return a matrix of tasks t0.. from lower-triangular (or fuller) rows."""
    tasks = tuple(f"t{j}" for j in range(len(rows)))
    matrix = AccuracyMatrix(tasks)
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            matrix.set(i, j, Score(value, counts[j] if counts else 10))
    return matrix


@st.composite
def triangles(draw: st.DrawFn, least: int = 2) -> list[list[float]]:
    size = draw(st.integers(least, 6))
    score = st.floats(0, 100)
    return [draw(st.lists(score, min_size=i + 1, max_size=i + 1)) for i in range(size)]


def test_worked_example() -> None:
    result = summary(matrix_of(WORKED), SINGLES)
    assert result["ap"] == pytest.approx(81.667, abs=1e-3)
    assert result["f_ra"] == 12.5
    assert result["bwt"] == -12.5
    assert result["bwt_m"] == pytest.approx(-8.333, abs=1e-3)
    assert result["fwt"] == pytest.approx(1.0)
    assert result["f_t"] == [10.0, 12.5]


@given(triangles())
def test_backward_transfer_never_loses_more_than_the_forgetting_rate(rows: list[list[float]]) -> None:
    values = matrix_of(rows).values()
    backward, forgetting = bwt(values), f_ra(values)
    assert backward is not None and forgetting is not None
    assert -backward <= forgetting + 1e-9
    assert bwt_m(values) == pytest.approx(backward * (len(rows) - 1) / len(rows))


@given(triangles())
def test_without_later_gains_both_are_equal(rows: list[list[float]]) -> None:
    falling = [[min(rows[k][j] for k in range(j, i + 1)) for j in range(i + 1)] for i in range(len(rows))]
    values = matrix_of(falling).values()
    assert f_ra(values) == pytest.approx(-(bwt(values) or 0.0))
    assert (f_ra(values) or 0.0) >= 0


@given(triangles())
def test_without_forgetting_the_signs_are_positive(rows: list[list[float]]) -> None:
    rising = [[max(rows[k][j] for k in range(j, i + 1)) for j in range(i + 1)] for i in range(len(rows))]
    values = matrix_of(rising).values()
    assert (f_ra(values) or 0.0) <= 0 <= (bwt(values) or 0.0)


@given(triangles())
def test_the_last_forgetting_is_the_forgetting_rate_when_no_zero_shot_was_measured(rows: list[list[float]]) -> None:
    values = matrix_of(rows).values()
    assert f_t(values)[-1] == pytest.approx(f_ra(values))
    assert len(f_t(values)) == len(rows) - 1


def test_slm_forgetting_counts_a_better_zero_shot_score() -> None:
    values: Values = [[50, 90, None], [50, 60, None], [50, 60, 70]]
    assert f_t(values) == [0, 15]
    assert f_ra(values) == 0


@given(triangles(least=1), st.floats(0, 100))
def test_forward_transfer_is_mean_diagonal_minus_mean_single(rows: list[list[float]], single: float) -> None:
    values = matrix_of(rows).values()
    own = sum(row[i] for i, row in enumerate(rows)) / len(rows)
    assert fwt(values, [single] * len(rows)) == pytest.approx(own - single)


@given(triangles(least=1))
def test_average_accuracy_equals_ap_for_equal_test_sets(rows: list[list[float]]) -> None:
    result = summary(matrix_of(rows))
    assert result["average_accuracy"] == pytest.approx(result["ap"])


def test_average_accuracy_weighs_by_samples() -> None:
    result = summary(matrix_of([[50.0], [0.0, 100.0]], counts=[30, 10]))
    assert (result["ap"], result["average_accuracy"]) == (50, 25)


def test_one_task_has_no_forgetting() -> None:
    result = summary(matrix_of([[80.0]]), {"t0": 70.0})
    assert (result["ap"], result["fwt"]) == (80, 10)
    assert (result["f_ra"], result["bwt"], result["bwt_m"], result["f_t"]) == (None, None, None, [])


def test_joint_training_has_one_row_and_only_averages() -> None:
    joint = AccuracyMatrix(("t0", "t1"), ("joint",))
    joint.set(0, 0, Score(60, 1))
    joint.set(0, 1, Score(80, 3))
    result = summary(joint, {"t0": 50.0, "t1": 50.0})
    assert (result["ap"], result["average_accuracy"]) == (70, 75)
    assert all(result[name] is None for name in ("f_ra", "fwt", "bwt", "bwt_m"))


def test_a_square_matrix_with_only_its_last_row_averages_too() -> None:
    matrix = AccuracyMatrix(("t0", "t1"))
    matrix.set(1, 0, Score(60, 1))
    matrix.set(1, 1, Score(80, 1))
    result = summary(matrix)
    assert (result["ap"], result["f_ra"], result["bwt"], result["f_t"]) == (70, None, None, [None])


def test_missing_singles_and_cells_give_none_not_numbers() -> None:
    matrix = matrix_of(WORKED)
    assert summary(matrix)["fwt"] is None
    assert summary(matrix, {"t0": 1.0})["fwt"] is None
    matrix.cells[2][1] = None
    result = summary(matrix, SINGLES)
    assert (result["ap"], result["average_accuracy"], result["f_ra"], result["bwt"]) == (None, None, None, None)


def test_an_unfinished_sequence_is_summed_up_so_far() -> None:
    matrix = matrix_of(WORKED)
    matrix.cells[2] = [None, None, None]
    assert ap(matrix.values()) is None
    assert summary(matrix.upto(2))["ap"] == 82.5
    assert summary(matrix.upto(2))["bwt"] == -10
