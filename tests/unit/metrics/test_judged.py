"""Outcomes of judged pairs and TRACE's delta, by hand."""

from __future__ import annotations

import pytest

from raycl.metrics.judged import JudgedScore, Outcome, Verdict, outcome


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["after", "after"], "win"),
        (["before", "before"], "loss"),
        (["tie", "tie"], "tie"),
        (["after", "before"], "tie"),  # the judge prefers a place, not an answer
        (["after", "tie"], "tie"),
    ],
)
def test_a_prompt_is_won_where_both_orders_agree(verdicts: list[Verdict], expected: Outcome) -> None:
    assert outcome(verdicts) == expected


def test_the_delta_is_the_mean_of_the_differences() -> None:
    score = JudgedScore.of(["win", "tie", "tie", "loss", "loss"])
    assert (score.prompts, score.win, score.tie, score.loss) == (5, 20.0, 40.0, 40.0)
    # R_t - R_0 of each prompt: 1, 0, 0, -1, -1
    assert score.delta == pytest.approx(100 * (1 + 0 + 0 - 1 - 1) / 5)
    assert -100 <= score.low < score.delta < score.high <= 100


def test_the_published_shares_give_their_delta() -> None:
    """TRACE's figure of Replay on LLaMA-2-13B-Chat: 10 / 18 / 72 percent for helpfulness."""
    counts: dict[Outcome, int] = {"win": 10, "tie": 18, "loss": 72}
    score = JudgedScore.of([name for name, count in counts.items() for _ in range(count)])
    assert score.delta == -62.0
