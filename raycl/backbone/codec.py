"""Text to token ids and back with a Hugging Face fast tokenizer (the `TextCodec` of `raycl.types`), and the kinds of
backbone that it is for."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from raycl.backbone.markup.chat_templates import renders_tools, turns
from raycl.backbone.markup.rendering import TOOL_ROLES, Conversation
from raycl.backbone.markup.special_strings import SpecialStrings
from raycl.errors import BackboneError, ConversationError
from raycl.types import Capabilities

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte in vocabularies that fall back to bytes."""

Kind = Literal["encoder", "encoder-decoder", "decoder"]

Bos = Literal["tokenizer", "none"]
"""The first token of a source of a decoder-only model: the tokenizer's, or none."""

KINDS: dict[str, Capabilities] = {
    "encoder": Capabilities("label", False, "mlm", "FEATURE_EXTRACTION"),
    "encoder-decoder": Capabilities("text", True, None, "SEQ_2_SEQ_LM"),
    "decoder": Capabilities("text", False, "clm", "CAUSAL_LM"),
}
"""Capabilities of each kind, by its name in records and settings."""


def capabilities_of(kind: str) -> Capabilities:
    """Return the capabilities of backbones of this kind.

    Raises:
        BackboneError: there is no such kind.
    """
    if kind not in KINDS:
        raise BackboneError(f"unknown kind of backbone '{kind}': expected one of {', '.join(KINDS)}")
    return KINDS[kind]


class HFCodec:
    """The tokenizer of a kind of backbone.

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
        self.capabilities: Capabilities = capabilities_of(kind)
        self.needs_labels: bool = self.capabilities.answers == "label"
        self.max_source_tokens = max_source_tokens
        self.max_target_tokens = max_target_tokens
        self.pad_id: int = _pad_id(tokenizer)
        if not self.needs_labels and tokenizer.eos_token_id is None:
            raise BackboneError(
                f"the tokenizer of this {kind} backbone has no end-of-sequence token, so answers never end: "
                "name one in its tokenizer_config.json (eos_token), or choose another backbone"
            )
        self.eos_id: int = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.mask_id: int = -1 if tokenizer.mask_token_id is None else tokenizer.mask_token_id
        self._special = SpecialStrings(tokenizer)
        self.special_ids: frozenset[Any] = self._special.ids
        self.special_strings: tuple[str, ...] = self._special.names
        self.vocabulary: int = len(tokenizer)
        self.chat_template: str = chat_template or _template_of(tokenizer)
        self.bos: Bos = bos
        if bos == "none":
            self._check_bos()
        self._end_tokens = _end_tokens(tokenizer) if self.capabilities.one_sequence else 0
        ids = f"{kind}|{self.pad_id}|{self.eos_id}|{'' if bos == 'tokenizer' else 'bos=none|'}"
        self.fingerprint: str = hashlib.sha256(f"{ids}{tokenizer.backend_tokenizer.to_str()}".encode()).hexdigest()[:16]

    def _check_bos(self) -> None:
        """Check that there is a first token to leave out."""
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
        """Return ids of whole prompts with special tokens, not truncated.

        A decoder-only model does not get the end that its tokenizer puts behind every text, because its answer comes
        there.
        """
        first = int(self.bos == "none")
        return [ids[first : len(ids) - self._end_tokens] for ids in self._encode(texts, special=True)]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ids of answers ending in the end-of-sequence id, not truncated; empty lists for encoder-only."""
        if self.needs_labels:
            return [[] for _ in texts]
        return [[*answer, self.eos_id] for answer in self._encode(texts, special=False)]

    def encode_chat(self, conversations: Sequence[Conversation], template: str) -> list[list[int]]:
        """Return ids of conversations up to where the assistant answers (`Around.prompt`), not truncated.

        A template writes a decoder-only model's special tokens; those of an encoder are added as for any text.

        Raises:
            ConversationError: the template cannot render a conversation.
        """
        prompts = [prompt for prompt, _ in self._turns(conversations, template)]
        return self._special.encode(prompts, not self.capabilities.one_sequence)

    def encode_chat_answers(
        self, conversations: Sequence[Conversation], answers: Sequence[Conversation], template: str
    ) -> list[list[int]]:
        """Return ids of answers as the template writes them, with the special tokens behind them and end-of-sequence.

        Where prompt and answer are one sequence, they are the ids of both without those of the prompt.

        Args:
            answers: for each conversation the assistant's message, and its calls of tools where it has any.

        Raises:
            ConversationError: the template cannot render a conversation, or an answer to it.
        """
        turns = self._turns(conversations, template, answers)
        if self.needs_labels:
            return [[] for _ in turns]
        if self.capabilities.one_sequence:
            prompts = self._special.encode([prompt for prompt, _ in turns], False)
            wholes = self._special.encode([f"{prompt}{answer}" for prompt, answer in turns], False)
            answer_ids = [
                both[len(prompt) :] if both[: len(prompt)] == prompt else self._special.encode([answer], False)[0]
                for prompt, both, (_, answer) in zip(prompts, wholes, turns, strict=True)
            ]
        else:
            answer_ids = self._special.encode([answer for _, answer in turns], False)
        return [ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id] for ids in answer_ids]

    def _turns(
        self,
        conversations: Sequence[Conversation],
        template: str,
        answers: Sequence[Conversation] | None = None,
    ) -> list[tuple[str, str]]:
        """Return the prompt and answer of each conversation, for `SpecialStrings.encode`; else empty ones."""
        messages = list(map(self._broken, conversations))
        given = None if answers is None else list(map(self._broken, answers))
        shown = f"in backbone.chat_template ('{' '.join(template[:40].split())}...')"
        name = "of the tokenizer" if template == _template_of(self.tokenizer) else shown
        for index, message in enumerate(messages):
            turn = [*message, *(given[index] if given else ())]
            if any(role in TOOL_ROLES for role, _ in turn) and not renders_tools(template):
                raise ConversationError(
                    f"the chat template {name} does not render tools, calls of them and their results: leave them "
                    "out, or name a template that does in backbone.chat_template",
                    index,
                )
        pairs = []
        try:
            for around, written in turns(template, self.tokenizer.special_tokens_map, messages, given):
                answer = "" if given is None else f"{written}{self._special.ending(around.tail)}"
                pairs.append((around.prompt, answer))
        except ValueError as error:
            problem = self._special.unbroken(str(error))
            raise ConversationError(
                f"the chat template {name} {problem}; change the messages, or name another template in "
                "backbone.chat_template",
                len(pairs),
            ) from error
        return pairs

    def _broken(self, conversation: Conversation) -> list[tuple[str, str]]:
        """Return messages in which no string is a control token."""
        return [(role, self._special.broken(content)) for role, content in conversation]

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Return ids of texts, in which no string is a control token."""
        return self._special.encode([self._special.broken(text) for text in texts], special)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary has it."""
        return list(self.tokenizer.convert_ids_to_tokens(list(ids)))

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens."""
        return str(self.tokenizer.decode(list(ids)))

    def token_text(self, token: int) -> str:
        """Return the text that a token adds behind another one; of a special token, its string."""
        before = self.tokenizer.encode("a", add_special_tokens=False)
        return self.shown([*before, token])[len(self.shown(before)) :]

    def token_bytes(self, token: int) -> list[int] | None:
        """Return the bytes of `token_text`, also of a part of a character; None: they are not known."""
        piece, text = self.pieces([token])[0], self.token_text(token)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return list(text.encode())
        if byte := BYTE_PIECE.fullmatch(piece):
            return [int(byte[1], 16)]
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # what is refused before does without

        bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
        return [bytes_of[character] for character in piece] if bytes_of.keys() >= set(piece) else None

    def clip(self, text: str, tokens: int) -> str:
        """Return the longest prefix of `text` with at most `tokens` tokens (special tokens not counted)."""
        if tokens <= 0:
            return ""
        offsets = self._special.offsets(text)
        return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]

    def decode(self, ids: Tensor | Sequence[Sequence[int]]) -> list[str]:
        """Return texts of generated ids, `[B, T]` or a list for each, without special tokens and outer white space."""
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


def _template_of(tokenizer: Any) -> str:
    """Return the tokenizer's chat template; of several the default one."""
    template = getattr(tokenizer, "chat_template", None)
    return str((template.get("default", "") if isinstance(template, dict) else template) or "")


def _end_tokens(tokenizer: Any) -> int:
    """Return how many special tokens a tokenizer puts behind a text."""
    is_added = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return is_added[::-1].index(0) if 0 in is_added else 0


def _pad_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "unk_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return int(value)
    raise BackboneError(
        f"{type(tokenizer).__name__} has neither pad, unknown nor end token: nothing can fill a batch up"
    )
