"""The strings of a tokenizer's special tokens, which are control tokens where a template writes them and text in data.

A tokenizer makes a control token of every such string in a text, so a row that says `</s>`, or a request that says
`<|im_end|>`, would end a turn.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from raycl.errors import BackboneError

_MARK, _BREAK = "\U0010fffc", "\U0010fffd"
"""Private characters: around a special string that a template wrote, and inside one of the data's."""


class SpecialStrings:
    """The special tokens of a fast tokenizer.

    Attributes:
        ids: ids of all special tokens, which decoding leaves out. names: their strings.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        self.ids: frozenset[Any] = frozenset(special.values()) | frozenset(tokenizer.all_special_ids)
        self.names: tuple[str, ...] = tuple(special)
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)"
        folds = any(token.special and token.normalized for token in added.values())
        self._found = re.compile(names, re.IGNORECASE if folds else 0)
        self._exact = re.compile(names)
        self._starts = {case for name in special for case in {name[0], name[0].lower(), name[0].upper()}}
        self._ending = re.compile(rf"(?:\s*(?:{names}))*")

    def broken(self, text: str) -> str:
        """Return a text of the data for a template, whose special strings are marked as not the template's."""
        clean = text.replace(_MARK, "\ufffd").replace(_BREAK, "\ufffd")
        if not any(start in clean for start in self._starts):  # decides most texts in a tenth of the expression's time
            return clean
        return self._found.sub(lambda match: f"{match[0][:1]}{_BREAK}{match[0][1:]}", clean)

    def ending(self, text: str) -> str:
        """Return the special strings that a text begins with, and the white space before each; "": none."""
        match = self._ending.match(text)
        assert match is not None, "no special string is one too"
        return match[0]

    def unbroken(self, text: str) -> str:
        return text.replace(_BREAK, "")

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return ids of texts whose `broken` strings are text, and whose other ones are control tokens."""
        if not texts:
            return []
        given = {"add_special_tokens": add_special_tokens, "truncation": False, "padding": False, "verbose": False}
        ids: list[list[int]] = self._tokenizer(list(texts), **given)["input_ids"]
        for index, text in enumerate(texts):
            if _BREAK in text:
                marked = self.unbroken(self._exact.sub(lambda match: f"{_MARK}{match[0]}{_MARK}", text))
                ids[index] = self._marked.encode(marked, add_special_tokens=add_special_tokens).ids
        return ids

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the offsets of the tokens in a text of the data."""
        if self._found.search(text):
            return list(self._marked.encode(text, add_special_tokens=False).offsets)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["offset_mapping"])

    @cached_property
    def _marked(self) -> Tokenizer:
        """The tokenizer with other names of its special tokens: their strings between marks.

        Its vocabulary has them too, since a model of pieces or words would find them there."""
        backend = self._tokenizer.backend_tokenizer
        tree = json.loads(backend.to_str())
        names = {name: f"{_MARK}{name}{_MARK}" for name in self.names}
        for token in tree["added_tokens"]:
            if token["content"] in names:
                token |= {"content": names[token["content"]], "normalized": False}
        model = tree["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(word, word): number for word, number in vocab.items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        tokenizer = Tokenizer.from_str(json.dumps(tree))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        moved = [name for name in names if tokenizer.token_to_id(names[name]) != backend.token_to_id(name)]
        if moved:
            raise BackboneError(
                "the data holds strings of special tokens, which this tokenizer cannot read as text, since "
                f"'{moved[0]}' would get another id: remove such strings, or choose another backbone"
            )
        return tokenizer
