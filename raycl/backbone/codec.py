"""Text to token ids and back with a Hugging Face fast tokenizer (the `TextCodec` of `raycl.types`).

What it does not know: prompts, files, batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from raycl.backbone.kinds import capabilities_of
from raycl.errors import BackboneError


class HFCodec:
    """Tokenizer of one backbone kind.

    Sources carry the special tokens the model was trained with; targets end in the end-of-sequence id.
    """

    def __init__(self, tokenizer: Any, kind: str, max_source_tokens: int, max_target_tokens: int) -> None:
        if not tokenizer.is_fast:
            raise BackboneError(f"{type(tokenizer).__name__} is not a fast tokenizer: expected a tokenizer.json")
        self.tokenizer = tokenizer
        self.kind = kind
        self.capabilities = capabilities_of(kind)
        self.needs_labels = self.capabilities.answers == "label"
        self.max_source_tokens = max_source_tokens
        self.max_target_tokens = max_target_tokens
        self.pad_id = _pad_id(tokenizer)
        if not self.needs_labels and tokenizer.eos_token_id is None:
            raise BackboneError(
                f"the tokenizer of this {kind} backbone has no end-of-sequence token, so answers never end: "
                "name one in its tokenizer_config.json (eos_token), or choose another backbone"
            )
        self.eos_id: int = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.mask_id: int = -1 if tokenizer.mask_token_id is None else tokenizer.mask_token_id
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.vocabulary = len(tokenizer)
        self.fingerprint = hashlib.sha256(
            f"{kind}|{self.pad_id}|{self.eos_id}|{tokenizer.backend_tokenizer.to_str()}".encode()
        ).hexdigest()[:16]

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of whole prompts with special tokens, not truncated."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), truncation=False, padding=False, verbose=False)["input_ids"]
        return ids

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of answers ending in the end-of-sequence id, not truncated; empty lists for encoder-only."""
        if self.needs_labels or not texts:
            return [[] for _ in texts]
        ids = self.tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return [[*answer, self.eos_id] for answer in ids]

    def clip(self, text: str, tokens: int) -> str:
        """The longest prefix of `text` with at most `tokens` tokens (special tokens not counted)."""
        if tokens <= 0:
            return ""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoded["offset_mapping"]
        return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]

    def decode(self, ids: Tensor) -> list[str]:
        """Texts of generated ids `[B, T]`, special tokens dropped, outer white space stripped."""
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


def _pad_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "unk_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return int(value)
    raise BackboneError(
        f"{type(tokenizer).__name__} has neither pad, unknown nor end token: nothing can fill a batch up"
    )
