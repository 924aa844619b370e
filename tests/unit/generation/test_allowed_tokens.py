"""The tokens that may follow each other where an answer is one of a few."""

from __future__ import annotations

import time

import pytest

from raycl.generation.requests import AllowedTokens

END = 0


@pytest.mark.parametrize(
    ("answers", "written", "expected"),
    [
        ([[5, 2, END], [5, 1, END], [3, END]], [], [3, 5]),
        ([[5, 2, END], [5, 1, END], [3, END]], [5], [1, 2]),
        ([[5, 2, END], [5, 1, END], [3, END]], [5, 1], [END]),
        ([[5, 2, END], [5, END]], [5], [END, 2]),
        ([[5], [5, 2]], [5], [2]),
        ([[5], [5, 2]], [5, 2], [END]),
        ([[5, 2]], [4], [END]),
        ([[5, 2]], [5, 2, 7, 7], [END]),
        ([[]], [], [END]),
    ],
)
def test_an_answer_continues_as_one_of_the_answers(
    answers: list[list[int]], written: list[int], expected: list[int]
) -> None:
    """The tokens may come one by one or at once."""
    assert AllowedTokens(answers, END).started().after(written) == expected
    state = AllowedTokens(answers, END).started()
    assert [list(state.after(written[:length])) for length in range(len(written) + 1)][-1] == expected


def test_answers_have_states_of_their_own() -> None:
    allowed = AllowedTokens([[5, 2], [4, 3]], END)
    one, other = allowed.started(), allowed.started()
    assert (one.after([5]), other.after([4]), one.after([5, 2])) == ([2], [3], [END])


def test_a_thousand_long_answers_take_no_time_to_prepare() -> None:
    """A tree that had a copy of each beginning held the interpreter for seconds, and took gigabytes."""
    answers = [[number // 100, *range(2000), number] for number in range(1000)]
    began = time.thread_time()
    state = AllowedTokens(answers, END).started()
    assert len(state.after([])) == 10 and len(state.after([0, *range(2000)])) == 100
    assert time.thread_time() - began < 1.0
