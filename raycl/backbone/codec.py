"""Text to token ids and back with a Hugging Face fast tokenizer (the `TextCodec` of `raycl.types`).

What it does not know: prompts, files, batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from torch import Tensor

from raycl.backbone.kinds import capabilities_of
from raycl.errors import BackboneError

Bos = Literal["tokenizer", "none"]
"""What stands first in a source of a decoder-only model: what the tokenizer puts there, or nothing."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat markup that many tokenizers have as their template."""


def template_source(value: str | None) -> str | None:
    """The Jinja source that `backbone.chat_template` names, so that every node and snapshot has the template itself.

    Raises:
        ValueError: the file does not exist.
    """
    if value is None or "{%" in value or "{{" in value:
        return value
    if value == "chatml":
        return CHATML
    file = Path(value).expanduser()
    if not file.is_file():
        raise ValueError(f"the chat template '{value}' is no file: expected a Jinja file, or chatml")
    return file.read_text(encoding="utf-8")


class HFCodec:
    """Tokenizer of one backbone kind.

    Sources carry the special tokens the model was trained with; targets end in the end-of-sequence id.

    Attributes:
        bos: none: sources are without the begin-of-sequence token that the tokenizer puts first. What a chat template
            writes stays.
    """

    def __init__(
        self,
        tokenizer: Any,
        kind: str,
        max_source_tokens: int,
        max_target_tokens: int,
        chat_template: str = "",
        bos: Bos = "tokenizer",
    ) -> None:
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
        self.chat_template = chat_template or _template_of(tokenizer)
        self.bos: Bos = bos
        if bos == "none":
            self._check_bos()
        ids = f"{kind}|{self.pad_id}|{self.eos_id}|{'' if bos == 'tokenizer' else 'bos=none|'}"
        self.fingerprint = hashlib.sha256(f"{ids}{tokenizer.backend_tokenizer.to_str()}".encode()).hexdigest()[:16]

    def _check_bos(self) -> None:
        """Whether there is a first token to leave out."""
        if not self.capabilities.one_sequence:
            raise BackboneError(
                f"backbone.bos is 'none' on a backbone of kind {self.kind}, but only decoder-only models were trained "
                "without that token (SAPT's LLaMA): expected bos=tokenizer"
            )
        bos_id = self.tokenizer.bos_token_id
        if bos_id is None or self.tokenizer("")["input_ids"][:1] != [bos_id]:
            raise BackboneError(
                "backbone.bos is 'none', but this tokenizer puts no begin-of-sequence token in front of a text: "
                "expected bos=tokenizer"
            )

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of whole prompts with special tokens, not truncated."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), truncation=False, padding=False, verbose=False)["input_ids"]
        return ids if self.bos == "tokenizer" else [found[1:] for found in ids]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of answers ending in the end-of-sequence id, not truncated; empty lists for encoder-only."""
        if self.needs_labels or not texts:
            return [[] for _ in texts]
        ids = self.tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return [[*answer, self.eos_id] for answer in ids]

    def encode_chat(self, conversations: Sequence[Sequence[tuple[str, str]]], template: str) -> list[list[int]]:
        """Ids of conversations up to where the assistant answers, not truncated.

        A template writes a decoder-only model's special tokens itself; an encoder's are put around as around any text.

        Raises:
            BackboneError: the template cannot render a conversation.
        """
        if not conversations:
            return []
        texts = [self._render(conversation, template, answered=False) for conversation in conversations]
        special = not self.capabilities.one_sequence
        found = self.tokenizer(texts, add_special_tokens=special, truncation=False, padding=False, verbose=False)
        ids: list[list[int]] = found["input_ids"]
        return ids

    def encode_chat_answers(
        self, conversations: Sequence[Sequence[tuple[str, str]]], answers: Sequence[str], template: str
    ) -> list[list[int]]:
        """Ids of answers, ending in the end-of-sequence id, before which stand special tokens of the template's end.

        Raises:
            BackboneError: the template cannot render a conversation.
        """
        texts = []
        for conversation, answer in zip(conversations, answers, strict=True):
            before = self._render(conversation, template, answered=False)
            whole = self._render([*conversation, ("assistant", answer)], template, answered=True)
            head, _, behind = (whole[len(before) :] if whole.startswith(before) else "").partition(answer)
            end = behind.strip().removesuffix(self.tokenizer.eos_token or "\0")
            texts.append(f"{head}{answer}{end if self._is_special(end) else ''}")
        return self.encode_target(texts)

    def _is_special(self, text: str) -> bool:
        """Whether a text is special tokens alone, which no answer shows."""
        ids = set(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids <= self.special_ids - {self.tokenizer.unk_token_id}

    def _render(self, conversation: Sequence[tuple[str, str]], template: str, answered: bool) -> str:
        messages = [{"role": role, "content": content} for role, content in conversation]
        settings = {"chat_template": template, "tokenize": False, "add_generation_prompt": not answered}
        try:
            text: str = self.tokenizer.apply_chat_template(messages, **settings)
        except TemplateError as error:
            roles = ", ".join(role for role, _ in conversation)
            raise BackboneError(
                f"the chat template cannot render a conversation of {roles}: {error}; repair the data, or name another "
                "template in backbone.chat_template"
            ) from error
        return text

    def shown(self, ids: Sequence[int]) -> str:
        """The text of ids with special tokens."""
        return str(self.tokenizer.decode(list(ids)))

    def clip(self, text: str, tokens: int) -> str:
        """The longest prefix of `text` with at most `tokens` tokens (special tokens not counted)."""
        if tokens <= 0:
            return ""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoded["offset_mapping"]
        return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]

    def decode(self, ids: Tensor | Sequence[Sequence[int]]) -> list[str]:
        """Texts of generated ids, `[B, T]` or a list for each, special tokens dropped, outer white space stripped."""
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


def _template_of(tokenizer: Any) -> str:
    """The tokenizer's chat template; of several the default one."""
    found = getattr(tokenizer, "chat_template", None)
    return str((found.get("default", "") if isinstance(found, dict) else found) or "")


def _pad_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "unk_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return int(value)
    raise BackboneError(
        f"{type(tokenizer).__name__} has neither pad, unknown nor end token: nothing can fill a batch up"
    )
