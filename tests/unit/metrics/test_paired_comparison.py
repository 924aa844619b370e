"""Differences of two methods over paired runs: known tests as special cases, a bootstrap by draws, and error rates."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from raycl.metrics.paired_comparison import POWER, RowScores, TaskScore, difference, holm

TEXTS = {"a": [f"text {number}" for number in range(40)], "b": [f"other {number}" for number in range(25)]}
Pairs = list[tuple[dict[str, TaskScore], dict[str, TaskScore]]]


def drawn(draw: np.random.Generator, seeds: int, effect: float = 0.0, of_seed: float = 3.0) -> Pairs:
    """Pairs of runs on two tasks with rows: what a row, a seed and chance add differs between the methods."""
    of_rows = {task: draw.normal(effect, 20, len(texts)) for task, texts in TEXTS.items()}
    pairs: Pairs = []
    for _ in range(seeds):
        shift = draw.normal(0, of_seed)
        first, second = {}, {}
        for task, texts in TEXTS.items():
            base = draw.uniform(20, 80, len(texts))
            changed = base + of_rows[task] + shift + draw.normal(0, 10, len(texts))
            for run, scores in ((first, changed), (second, base)):
                run[task] = TaskScore(float(scores.mean()), RowScores.of(scores.tolist(), texts))
        pairs.append((first, second))
    return pairs


def scores_of(score: TaskScore) -> np.ndarray:
    assert score.rows is not None
    return score.rows.scores


def without_rows(pairs: Pairs, *tasks: str) -> Pairs:
    return [tuple({task: TaskScore(run[task].value) for task in tasks or run} for run in pair) for pair in pairs]


def test_one_number_for_each_seed_is_the_paired_t_test() -> None:
    pairs = without_rows(drawn(np.random.default_rng(0), 5, 4.0), "a")
    one, other = zip(*[(first["a"].value, second["a"].value) for first, second in pairs], strict=True)
    found, expected = difference(pairs), stats.ttest_rel(one, other)
    assert found is not None and found.over == "seeds" and found.p == pytest.approx(expected.pvalue)
    limits = expected.confidence_interval()
    assert found.interval == pytest.approx((limits.low, limits.high))


def test_the_error_is_that_of_a_bootstrap_over_seeds_and_rows() -> None:
    """Both are drawn at once, 4,000 times; the draws lack the factor n / (n - 1), which is small for eight seeds."""
    draw, pairs = np.random.default_rng(1), drawn(np.random.default_rng(2), 8)
    found = difference(pairs)
    assert found is not None and found.over == "seeds and test rows"
    rows = {
        task: np.array([scores_of(first[task]) - scores_of(second[task]) for first, second in pairs]) for task in TEXTS
    }
    means = []
    for _ in range(4000):
        seeds = draw.integers(8, size=8)
        picked = [cells[seeds][:, draw.integers(cells.shape[1], size=cells.shape[1])].mean() for cells in rows.values()]
        means.append(np.mean(picked))
    assert found.error == pytest.approx(np.std(means), rel=0.15)
    assert found.mean == pytest.approx(np.mean(means), abs=0.3)


@pytest.mark.parametrize(("seeds", "has_rows"), [(2, True), (3, True), (3, False), (5, False)])
def test_methods_that_are_alike_are_told_apart_in_one_of_twenty_repetitions(seeds: int, has_rows: bool) -> None:
    draw, told = np.random.default_rng(seeds), 0
    for _ in range(400):
        if has_rows:
            pairs = drawn(draw, seeds)
        else:
            cells = draw.normal(0, 2, (seeds, 1)) + draw.normal(0, 2, (seeds, 6))
            pairs = [
                ({str(t): TaskScore(x) for t, x in enumerate(row)}, dict.fromkeys("012345", TaskScore(0.0)))
                for row in cells
            ]
        found = difference(pairs)
        assert found is not None and found.p is not None
        told += found.p < 0.05
    assert told / 400 < 0.075


def test_the_number_of_seeds_that_could_tell_has_the_power() -> None:
    """Fresh runs with as many seeds tell the difference about as often as promised."""
    draw = np.random.default_rng(5)
    cells = np.array([1.0, 5.0, 3.0])
    pairs = [({"a": TaskScore(cell)}, {"a": TaskScore(0.0)}) for cell in cells]
    found = difference(pairs)
    assert found is not None and found.p is not None and found.p > 0.05
    needed = found.seeds_needed()
    assert needed is not None and needed == 6
    assert found.seeds_needed(0.005) > needed
    told = stats.ttest_1samp(draw.normal(cells.mean(), cells.std(ddof=1), (4000, needed)), 0, axis=1).pvalue < 0.05
    assert POWER - 0.02 < told.mean() < 0.95


def test_rows_are_used_where_both_runs_have_the_same() -> None:
    pairs = drawn(np.random.default_rng(3), 3)
    other_texts = {task: RowScores.of(scores_of(score).tolist(), ["x"]) for task, score in pairs[0][0].items()}
    changed = {task: TaskScore(score.value, other_texts[task]) for task, score in pairs[0][0].items()}
    found = difference([(changed, pairs[0][1]), *pairs[1:]])
    assert found is not None and found.over == "seeds and tasks"
    assert difference(without_rows(pairs)) == found
    redrawn = []
    for seed, pair in enumerate(pairs):
        texts = [f"row {number} of seed {seed}" for number in range(40)]
        redrawn.append(
            tuple({"a": TaskScore(run["a"].value, RowScores.of(scores_of(run["a"]).tolist(), texts))} for run in pair)
        )
    found = difference(redrawn)
    assert found is not None and found.over == "seeds and test rows"
    assert [part.shrinks for part in found.parts] == [True] * 4, "more seeds bring more rows"


def test_one_seed_is_compared_over_its_tasks_and_one_task_says_nothing() -> None:
    pairs = drawn(np.random.default_rng(4), 1)
    found = difference(pairs)
    assert found is not None and (found.over, found.seeds, found.seeds_needed()) == ("tasks", 1, None)
    alone = difference(without_rows(pairs, "a"))
    assert alone is not None and alone.p is None and alone.interval is None
    assert difference([]) is None


def test_holms_correction() -> None:
    """The smallest p-value is multiplied by their number, the next by one less; none falls below a smaller one.

    Those after the first that fails had to reach its level.
    """
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == [
        pytest.approx((0.03, 0.05 / 3)),
        pytest.approx((0.06, 0.025)),
        None,
        pytest.approx((0.06, 0.025)),
        pytest.approx((0.02, 0.0125)),
    ]
    assert holm([]) == []
