"""From logits to tokens to pieces of text, each answer with its own settings, draws and ends.

What it does not know: models, batches that change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raycl.serve.asks import Sampling


def pick(logits_BV: Tensor, settings: Sequence[Sampling], draws: Sequence[torch.Generator]) -> list[int]:
    """The next token of each row: a row's own settings and generator decide, whoever its neighbours are."""
    tokens: list[int] = logits_BV.argmax(-1).tolist()
    drawn = [row for row, one in enumerate(settings) if one.temperature > 0]
    if not drawn:
        return tokens
    heat = torch.tensor([settings[row].temperature for row in drawn])
    nucleus = torch.tensor([settings[row].top_p for row in drawn])
    chances, order = (logits_BV[drawn].float().cpu() / heat[:, None]).softmax(-1).sort(dim=-1, descending=True)
    before = chances.cumsum(-1) - chances
    chances = chances.masked_fill(before >= nucleus[:, None], 0.0)
    chances[:, 0] = chances[:, 0].clamp_min(1e-12)
    points = torch.stack([torch.rand((), generator=draws[row]) for row in drawn]) * chances.sum(-1)
    places = (chances.cumsum(-1) <= points[:, None]).sum(-1).clamp(max=chances.shape[1] - 1)
    for row, place, ids in zip(drawn, places.tolist(), order, strict=True):
        tokens[row] = int(ids[place])
    return tokens


class Spoken:
    """One answer's tokens as text that may be sent on.

    Attributes:
        ids: tokens so far. finish: why it ended, None while it goes on.
    """

    def __init__(self, tokenizer: Any, eos_id: int, settings: Sampling) -> None:
        self._tokenizer, self._eos, self.settings = tokenizer, eos_id, settings
        self.ids: list[int] = []
        self.finish: str | None = None
        self._sent = 0

    def push(self, token: int) -> str:
        """Take a token; returns the text that can be sent now, maybe none."""
        if token == self._eos:
            self.finish = "stop"
        else:
            self.ids.append(token)
        text: str = self._tokenizer.decode(self.ids, skip_special_tokens=True).lstrip()
        ends = [place for stop in self.settings.stop if (place := text.find(stop)) >= 0]
        if ends:
            text, self.finish = text[: min(ends)], "stop"
        if self.finish is None and len(self.ids) >= self.settings.max_tokens:
            self.finish = "length"
        upto = len(text) if self.finish else len(text) - self._held(text)
        piece = text[self._sent : upto]
        self._sent = max(self._sent, upto)
        return piece

    def _held(self, text: str) -> int:
        """Characters at the end that may still become something else: half a character, or the start of a stop."""
        if text.endswith("�"):
            return 1
        starts = [
            length for stop in self.settings.stop for length in range(1, len(stop)) if text.endswith(stop[:length])
        ]
        return max(starts, default=0)
