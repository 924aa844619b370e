"""Changes of logits before a token is chosen: penalties, biases, and the tokens that an answer may have next.

The formulas of penalties are OpenAI's (frequency and presence, over the tokens of the answer) and vLLM's (repetition,
over prompt and answer; Keskar et al., 2019, section 4.1), in vLLM's order: bias, repetition, frequency, presence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from raycl.generation.requests import Sampling


def adjusted(
    logits_BV: Tensor, settings: Sequence[Sampling], prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Tensor:
    """Return the logits of the next token of each row under the row's own settings.

    Args:
        prompts: tokens of each row's prompt, for `repetition_penalty`. answers: tokens of each row so far.
    """
    changed = [row for row, setting in enumerate(settings) if setting.adjusts]
    trees = {row: allowed for row, setting in enumerate(settings) if (allowed := setting.allowed) is not None}
    if not (changed or trees):
        return logits_BV
    logits_BV = logits_BV.float() if changed else logits_BV.clone()
    for row in changed:
        logits_BV[row] = _penalized(logits_BV[row], settings[row], prompts[row], answers[row])
    if trees:
        barred_MV = torch.ones(len(trees), logits_BV.shape[1], dtype=torch.bool)
        for index, (row, allowed) in enumerate(trees.items()):
            barred_MV[index, allowed.after(answers[row])] = False
        limited = list(trees)
        logits_BV[limited] = logits_BV[limited].masked_fill(barred_MV.to(logits_BV.device), -torch.inf)
    return logits_BV


def _penalized(logits_V: Tensor, setting: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    device = logits_V.device
    logits_V = logits_V.clone()
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
    return logits_V
