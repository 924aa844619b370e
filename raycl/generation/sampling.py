"""Converts logits to tokens and pieces of text; each answer has its own settings, draws and ends.

Logits get penalties and biases, and of the tokens that an answer may not have -inf. The formulas of penalties are
OpenAI's (frequency and presence, over the tokens of the answer) and vLLM's (repetition, over prompt and answer; Keskar
et al., 2019, section 4.1), in vLLM's order: bias, repetition, frequency, presence.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from raycl.generation.requests import Sampling, TokenConstraint, TokenLogprob, TokenLogprobs

NOT_FINITE = -1
"""Returned instead of a token for a row whose logits are not finite."""

COLDEST = 1e-4
"""Lower temperatures are raised to this one, at which only the most likely token is left."""


def pick(logits_BV: Tensor, settings: Sequence[Sampling], draws: Sequence[torch.Generator]) -> list[int]:
    """Return the next token of each row: from the row's own settings and random generator, independent of other rows.

    Of equally likely tokens the first one counts as more likely. Transformers' own processors keep the last one, take
    one `top_p` for all rows, and in double precision need 1.0 to 1.5 times as long for 1 to 32 rows of 49,152 tokens.
    """
    best_B, first_B = logits_BV.max(-1)
    tokens: list[int] = torch.where(torch.isfinite(best_B), first_B, NOT_FINITE).tolist()
    drawn = [row for row, setting in enumerate(settings) if setting.temperature > 0 and tokens[row] != NOT_FINITE]
    if not drawn:
        return tokens
    device = logits_BV.device
    heats = [[max(COLDEST, settings[row].temperature)] for row in drawn]
    heat_D1 = torch.tensor(heats, dtype=torch.float64, device=device)
    chances_DV = ((logits_BV[drawn] - best_B[drawn, None]).double() / heat_D1).softmax(-1)
    points_D1 = torch.stack([torch.rand(1, generator=draws[row], dtype=torch.float64) for row in drawn]).to(device)
    full = [index for index, row in enumerate(drawn) if not settings[row].truncates]
    part = [index for index, row in enumerate(drawn) if settings[row].truncates]
    if full:
        for index, token in zip(full, _placed(chances_DV[full], points_D1[full]).tolist(), strict=True):
            tokens[drawn[index]] = token
    if part:
        sorted_DV, order_DV = chances_DV[part].sort(dim=-1, descending=True, stable=True)
        kept_DV = _truncated(sorted_DV, [settings[drawn[index]] for index in part])
        found_D = order_DV.gather(-1, _placed(kept_DV, points_D1[part])[:, None])[:, 0]
        for index, token in zip(part, found_D.tolist(), strict=True):
            tokens[drawn[index]] = token
    return tokens


def _truncated(sorted_DV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Return falling chances with 0 for tokens that are not drawn: by `min_p`, then `top_k`, then `top_p` of the rest.

    That is vLLM's order; its order of the last two is that of Transformers too.
    """

    def column(values: Sequence[float]) -> Tensor:  # in float32 the smallest chances would be 0
        return torch.tensor(values, dtype=torch.float64, device=sorted_DV.device)[:, None]

    width = sorted_DV.shape[-1]
    places_1V = torch.arange(width, device=sorted_DV.device)[None]
    few_D1 = column([setting.top_k or width for setting in settings])
    least_D1 = sorted_DV[:, :1] * column([setting.min_p for setting in settings])
    sorted_DV = sorted_DV.masked_fill((places_1V >= few_D1) | (sorted_DV < least_D1), 0.0)
    before_DV = sorted_DV.cumsum(-1) - sorted_DV
    nucleus_D1 = column([setting.top_p for setting in settings]) * sorted_DV.sum(-1, keepdim=True)
    return sorted_DV.masked_fill((before_DV >= nucleus_D1) & (places_1V > 0), 0.0)


def _placed(chances_DV: Tensor, points_D1: Tensor) -> Tensor:
    """Return the token at each point of [0, 1) when a row is laid out by its chances; never one whose chance is 0."""
    sums_DV = chances_DV.cumsum(-1)
    return (sums_DV <= points_D1 * sums_DV[:, -1:]).sum(-1)


WINDOW, CONTEXT = 64, 8
"""After so many tokens those but the last `CONTEXT` are decoded for the last time; as many before them stay in front of
later ones, since a tokenizer may read a token by its neighbours."""


class DecodedText:
    """An answer's tokens as text that may be sent.

    Stops are looked for in all that the tokens say, white space included, and special tokens too where a stop has one.

    Attributes:
        ids: tokens so far. finish: why it ended, None while it continues.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: Collection[int],
        settings: Sampling,
        continues: Sequence[int] | None = None,
        special: Collection[str] = (),
    ) -> None:
        """Start empty.

        Args:
            ends: tokens that end the answer and are no part of it.
            continues: the last tokens of the text that the answer continues, exactly as its tokens say; None: it is an
                answer by itself, without white space around it, as it is scored.
            special: strings of the special tokens.
        """
        self.settings = settings
        self._tokenizer, self._ends = tokenizer, ends
        self._continues, self._strips = list(continues or ()), continues is None
        self._tidies = self._strips and bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._reading = {} if self._strips else {"clean_up_tokenization_spaces": False}
        is_sought = any(name in stop for name in special for stop in settings.stop)
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special = re.compile(names) if is_sought else None
        self._before = len(self._decoded([]).rstrip("\N{REPLACEMENT CHARACTER}"))
        self.ids: list[int] = []
        self.finish: str | None = None
        self._sent = 0
        self._settled, self._first, self._next = "", 0, WINDOW

    def push(self, token: int) -> str:
        """Add a token, and return the text that can be sent now, which may be empty."""
        if token in self._ends:
            self.finish = "stop"
        else:
            self.ids.append(token)
        text = self._text()
        ends = [position for stop in self.settings.stop if (position := text.find(stop)) >= 0]
        if ends:
            text, self.finish = text[: min(ends)], "stop"
        if self.finish is None and len(self.ids) >= self.settings.max_tokens:
            self.finish = "length"
        sure = text if self.finish else text[: len(text) - self._withheld(text)]
        if self._special is not None and not self.settings.keeps_special:
            sure = self._special.sub("", sure)
        if self._strips:
            sure = sure.strip()
        piece, self._sent = sure[self._sent :], max(self._sent, len(sure))
        return piece

    def _text(self) -> str:
        """Return the text of all tokens, of which only the last ones are decoded again."""
        text = self._settled + self._decoded(self.ids[self._first :])[self._before :]
        if len(self.ids) < self._next or self._tidies:
            return text
        first = len(self.ids) - CONTEXT
        context = self.ids[first - CONTEXT : first]
        front, whole = self._read(context), self._read(self.ids[first - CONTEXT :])
        rest = whole[len(front) :]
        is_cut = "\N{REPLACEMENT CHARACTER}" in whole  # a character is in two parts: the next place is tried
        if not is_cut and whole.startswith(front) and text.endswith(rest):
            self._continues, self._before, self._first = context, len(front), first
            self._next = len(self.ids) + WINDOW
            self._settled = text.removesuffix(rest)
        return text

    def _decoded(self, ids: list[int]) -> str:
        """Return the text of tokens and of those that they continue."""
        return self._read([*self._continues, *ids])

    def _read(self, ids: list[int]) -> str:
        """Return the text of tokens; with special tokens where a stop has one."""
        skips = self._special is None and not self.settings.keeps_special
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skips, **self._reading)
        return text

    def _withheld(self, text: str) -> int:
        """Return the number of characters at the end that may still change.

        Parts of a character, the start of a stop, and for tokenizers that tidy up what they decode (`it 's`) the last
        word with the space before it.
        """
        solid = text.rstrip("\N{REPLACEMENT CHARACTER}")
        lengths = [len(text) - len(solid)]
        if self._tidies:
            lengths.append(len(text) - max(0, solid.rstrip().rfind(" ")))
        for stop in self.settings.stop:
            longest = min(len(stop) - 1, len(solid))
            fits = (length for length in range(longest, 0, -1) if solid.endswith(stop[:length]))
            lengths.append(len(text) - len(solid) + next(fits, 0))
        return max(lengths)


def adjusted(
    logits_BV: Tensor,
    settings: Sequence[Sampling],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    constraints: Sequence[TokenConstraint | None],
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
