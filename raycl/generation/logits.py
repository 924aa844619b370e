"""Logits of the next token: penalties, biases and the tokens that an answer may have; and their log probabilities.

The formulas of penalties are OpenAI's (frequency and presence, over the tokens of the answer) and vLLM's (repetition,
over prompt and answer; Keskar et al., 2019, section 4.1), in vLLM's order: bias, repetition, frequency, presence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from raycl.generation.requests import Sampling, TokenConstraintState, TokenLogprob, TokenLogprobs


def adjusted(
    logits_BV: Tensor,
    settings: Sequence[Sampling],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    constraints: Sequence[TokenConstraintState | None],
) -> Tensor:
    """Return the logits of the next token of each row under the row's own settings.

    Args:
        prompts: tokens of each row's prompt, for `repetition_penalty`. answers: tokens of each row so far.
        constraints: limit of each row's tokens; None: all.
    """
    changed = [row for row, setting in enumerate(settings) if setting.adjusts]
    limits = {row: constraint for row, constraint in enumerate(constraints) if constraint is not None}
    if not (changed or limits):
        return logits_BV
    logits_BV = logits_BV.to(torch.float32 if changed else logits_BV.dtype, copy=True)
    for row in changed:
        _penalize(logits_BV[row], settings[row], prompts[row], answers[row])
    if limits:
        barred_MV = torch.ones(len(limits), logits_BV.shape[1], dtype=torch.bool)
        for index, (row, constraint) in enumerate(limits.items()):
            barred_MV[index, constraint.after(answers[row])] = False
        limited = list(limits)
        logits_BV[limited] = logits_BV[limited].masked_fill(barred_MV.to(logits_BV.device), -torch.inf)
    return logits_BV


def _penalize(logits_V: Tensor, setting: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Change the logits of one row."""
    device = logits_V.device
    if setting.logit_bias:
        biased, biases = zip(*setting.logit_bias, strict=True)
        logits_V.index_add_(0, torch.tensor(biased, device=device), torch.tensor(biases, device=device))
    if setting.repetition_penalty != 1 and (prompt or answer):
        seen = torch.tensor(list({*prompt, *answer}), device=device)
        before = logits_V[seen]
        factor = setting.repetition_penalty
        logits_V[seen] = torch.where(before > 0, before / factor, before * factor)
    if answer:
        written, counts = (torch.tensor(values, device=device) for values in zip(*Counter(answer).items(), strict=True))
        logits_V[written] -= setting.frequency_penalty * counts + setting.presence_penalty


def logprobs_of(logits_MV: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log probability of a token in each row of logits.

    Args:
        count: most likely tokens that are returned with each.
    """
    logprobs_MV = logits_MV.float().log_softmax(-1)
    own_M = logprobs_MV.gather(1, torch.tensor(tokens, device=logits_MV.device)[:, None])[:, 0].tolist()
    top = logprobs_MV.topk(count, dim=-1)
    return [
        TokenLogprobs(token, own, tuple(map(TokenLogprob, ids, values)))
        for token, own, ids, values in zip(tokens, own_M, top.indices.tolist(), top.values.tolist(), strict=True)
    ]
