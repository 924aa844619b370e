"""Penalties, biases and truncation by the published formulas, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from raycl.generation.requests import AllowedTokens, Sampling
from raycl.generation.sampling import adjusted, pick

PROMPT, ANSWER = [1, 2, 2], [2, 4, 4, 4]
LOGITS = [0.5, -1.0, 2.0, 3.0, -0.25, 0.0]


def changed(answer: list[int], **settings: Any) -> list[float]:
    """Return logits of one row."""
    return adjusted(torch.tensor([LOGITS]), [Sampling(9, **settings)], [PROMPT], [answer], [None])[0].tolist()


def test_frequency_and_presence_count_the_answer_alone() -> None:
    """OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence, with the sampled tokens' counts c."""
    counts = [ANSWER.count(token) for token in range(len(LOGITS))]
    expected = [mu - c * 0.5 - (c > 0) * 0.25 for mu, c in zip(LOGITS, counts, strict=True)]
    assert changed(ANSWER, frequency_penalty=0.5, presence_penalty=0.25) == pytest.approx(expected)
    assert changed([], frequency_penalty=2.0, presence_penalty=2.0) == pytest.approx(LOGITS)


@given(st.floats(0.125, 2, width=32))
def test_repetition_counts_prompt_and_answer_as_transformers_does(penalty: float) -> None:
    ids = torch.tensor([[*PROMPT, *ANSWER]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, torch.tensor([LOGITS]))[0].tolist()
    assert changed(ANSWER, repetition_penalty=penalty) == pytest.approx(expected)


def test_bias_comes_first_and_repetition_before_the_others() -> None:
    settings = {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 0.5}
    assert changed([4], **settings, logit_bias=((4, 2.25), (0, -1.0))) == pytest.approx(
        [-0.5, -2.0, 1.0, 3.0, (-0.25 + 2.25) / 2 - 1.5, 0.0]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_without_settings_is_left_as_it_is(dtype: torch.dtype) -> None:
    rows = torch.tensor([LOGITS, LOGITS], dtype=dtype)
    settings = [Sampling(9), Sampling(9, presence_penalty=1.0)]
    plain, penalized = adjusted(rows, settings, [PROMPT] * 2, [ANSWER] * 2, [None] * 2)
    assert plain.tolist() == rows[0].tolist() and penalized.tolist() != rows[1].tolist()
    assert rows.tolist() == torch.tensor([LOGITS] * 2, dtype=dtype).tolist(), "the model's are not changed"
    (only,) = adjusted(rows[:1], settings[1:], [PROMPT], [[2]], [AllowedTokens([[2, 3]], end=0).started()])
    assert only.isfinite().nonzero().flatten().tolist() == [3]


@given(
    st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=9, unique=True),
    st.floats(0.2, 2),
    st.integers(0, 9),
    st.floats(0.1, 1),
    st.floats(0, 1),
)
def test_only_tokens_that_transformers_keeps_are_drawn(
    logits: list[float], heat: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Each alone and together, in vLLM's order."""
    row = torch.tensor([logits], dtype=torch.float64) / heat
    warpers = LogitsProcessorList([MinPLogitsWarper(min_p)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(min(1.0, top_p + 1e-6))]
    kept = set(warpers(torch.zeros(1, 1, dtype=torch.long), row)[0].isfinite().nonzero().flatten().tolist())
    setting = Sampling(1, heat, top_p, top_k=top_k, min_p=min_p)
    draw = torch.Generator().manual_seed(3)
    drawn = {pick(torch.tensor([logits]), [setting], [draw])[0] for _ in range(12)}
    assert drawn <= kept, (drawn, kept)


def test_min_p_and_top_k_keep_what_they_should() -> None:
    logits, draw = torch.tensor([[2.0, 2.0, 1.9, 0.0]]), torch.Generator().manual_seed(1)

    def seen(**settings: Any) -> set[int]:
        return {pick(logits, [Sampling(1, 1.0, **settings)], [draw])[0] for _ in range(300)}

    assert seen() == {0, 1, 2, 3} and seen(top_k=2) == {0, 1} and seen(top_k=1) == {0}
    assert seen(min_p=0.5) == {0, 1, 2} and seen(min_p=1.0) == {0, 1}
    assert seen(top_k=3, top_p=0.3) == {0}, "the nucleus is a share of what top_k leaves"
