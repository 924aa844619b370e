"""Published variants, each against its formula written out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycl.metrics.matrix import AccuracyMatrix
from raycl.metrics.variants import VARIANTS, compute_variants
from raycl.types import Score

WORKED: list[list[float | None]] = [[90.0, None, None], [80.0, 85.0, None], [70.0, 80.0, 95.0]]
GAINING: list[list[float | None]] = [[50.0, 20.0, None], [40.0, 60.0, 30.0], [70.0, 55.0, 90.0]]


def matrix_of(rows: list[list[float | None]]) -> AccuracyMatrix:
    cells = [[None if value is None else Score(value, 10) for value in row] for row in rows]
    return AccuracyMatrix(tuple(f"t{j}" for j in range(len(rows))), cells=cells)


def test_every_variant_of_the_worked_example() -> None:
    numbers = compute_variants(matrix_of(WORKED), {"t0": 88.0, "t1": 86.0, "t2": 93.0})
    assert numbers == {
        "ap_sapt": pytest.approx(245 / 3),
        "f_ra_sapt": 12.5,
        "fwt_sapt": pytest.approx(1.0),
        "fwt_sapt_code": pytest.approx(90 - 50.94),
        "bwt_sapt": -12.5,
        "bwt_sapt_code": pytest.approx(-25 / 3),
        "fwt_gainlora": 90,
        "forgetting_gainlora": 12.5,
        "bwt_gainlora": pytest.approx(-25 / 3),
        "bwt_mammoth": -12.5,
        "fwt_mammoth": None,
        "forgetting_mammoth": 12.5,
        "bwt_libcontinual": pytest.approx((70 - 90) * 2 / (2 * 3)),
        "forgetting_libcontinual": pytest.approx((90 - 70) / 2),
        "bwt_treelora": pytest.approx(-25 / 3),
        "f_t_slm": 12.5,
    }


def test_where_gains_make_the_variants_disagree() -> None:
    numbers = compute_variants(matrix_of(GAINING), untrained={"t0": 0.0, "t1": 5.0, "t2": 10.0})
    assert numbers["f_ra_sapt"] == pytest.approx((50 - 70 + 60 - 55) / 2)
    assert numbers["forgetting_mammoth"] == pytest.approx((0 + 5) / 2)
    assert numbers["bwt_treelora"] == pytest.approx(-5 / 3)
    assert numbers["bwt_mammoth"] == pytest.approx((20 - 5) / 2)
    assert numbers["fwt_mammoth"] == pytest.approx((15 + 20) / 2)
    assert numbers["fwt_sapt"] is None


def test_the_official_scorer_subtracts_its_constant() -> None:
    numbers = compute_variants(matrix_of([[52.48, None], [10.0, 52.48]]))
    assert numbers["fwt_sapt_code"] == pytest.approx(1.54)


def test_published_sapt_bwt_is_divided_by_the_number_of_tasks() -> None:
    # Without later gains BWT = -F.Ra * 14/15 over 15 tasks: SeqLoRA's printed 82.07 and -76.60.
    rows: list[list[float | None]] = [
        [100.0 if j == i else 100 - 82.07 if j < i else None for j in range(15)] for i in range(15)
    ]
    numbers = compute_variants(matrix_of(rows))
    assert numbers["f_ra_sapt"] == pytest.approx(82.07)
    assert numbers["bwt_sapt_code"] == pytest.approx(-76.60, abs=5e-3)


@given(
    st.integers(3, 6).flatmap(
        lambda m: st.lists(st.lists(st.floats(0, 100), min_size=m, max_size=m), min_size=m, max_size=m)
    )
)
def test_libcontinual_is_its_double_sum(rows: list[list[float]]) -> None:
    m = len(rows)
    numbers = compute_variants(
        matrix_of([[v if j <= i else None for j, v in enumerate(row)] for i, row in enumerate(rows)])
    )
    double_sum = sum(rows[i][j] - rows[j][j] for i in range(2, m) for j in range(i - 1))
    assert numbers["bwt_libcontinual"] == pytest.approx(2 * double_sum / (m * (m - 1)))
    skipped = sum(rows[j][j] - rows[-1][j] for j in range(m - 2))
    assert numbers["forgetting_libcontinual"] == pytest.approx(skipped / (m - 1))


def test_joint_training_has_averages_only() -> None:
    joint = AccuracyMatrix(("t0", "t1", "t2"), ("joint",), [[Score(60, 1), Score(70, 1), Score(80, 1)]])
    numbers = compute_variants(joint, {"t0": 1.0, "t1": 1.0, "t2": 1.0}, {"t0": 1.0, "t1": 1.0, "t2": 1.0})
    assert numbers.pop("ap_sapt") == 70
    assert set(numbers.values()) == {None}


def test_each_variant_names_its_source() -> None:
    assert all(len(variant.source) > 20 and "\n" not in variant.source for variant in VARIANTS.values())
