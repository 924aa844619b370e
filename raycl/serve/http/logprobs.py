"""Log probabilities of tokens on the wire: OpenAI's shape of them in chats, and its older one in completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycl.backbone.codec import HFCodec
from raycl.generation.requests import PromptLogprobs, TokenLogprob, TokenLogprobs

LEAST = -9999.0
"""Sent instead of smaller ones, since JSON has no infinity; vLLM's value."""


def chat_logprobs(codec: HFCodec, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return `logprobs` of a choice or a chunk of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": codec.token_text(token), "logprob": max(logprob, LEAST), "bytes": codec.token_bytes(token)}

    content = [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(*other) for other in one.top]} for one in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    codec: HFCodec, logprobs: Sequence[TokenLogprobs], offset: int = 0, prompt: PromptLogprobs | None = None
) -> dict[str, Any]:
    """Return `logprobs` of a choice or a chunk of a completion.

    Args:
        offset: characters of the choice before these tokens.
        prompt: those of the prompt, where it is echoed before them.
    """
    found = [*(prompt.logprobs if prompt else ()), *logprobs]
    tokens = [*([codec.token_text(prompt.first)] if prompt else []), *(codec.token_text(one.token) for one in found)]
    chances: list[float | None] = [*([None] if prompt else []), *(max(one.logprob, LEAST) for one in found)]
    top: list[dict[str, float] | None] = [*([None] if prompt else []), *(_top(codec, one) for one in found)]
    offsets = [offset + sum(map(len, tokens[:number])) for number in range(len(tokens))]
    return {"tokens": tokens, "token_logprobs": chances, "top_logprobs": top, "text_offset": offsets}


def _top(codec: HFCodec, one: TokenLogprobs) -> dict[str, float]:
    """Return the most likely tokens at a place, the chosen one among them."""
    own = TokenLogprob(one.token, one.logprob)
    texts = {codec.token_text(token): max(logprob, LEAST) for token, logprob in (*reversed(one.top), own)}
    return dict(sorted(texts.items(), key=lambda pair: -pair[1]))
