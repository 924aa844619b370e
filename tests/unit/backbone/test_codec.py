"""Text to ids and back, as each kind of backbone wants it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import KINDS, WORDS, tokenizer

from raycl.backbone.codec import HFCodec
from raycl.errors import BackboneError

NAMES = {"bert": "encoder", "t5": "encoder-decoder", "llama": "decoder", "gpt2": "decoder"}


def codec(kind: str) -> HFCodec:
    return HFCodec(tokenizer(kind), NAMES[kind], 24, 4)


def without_bos(kind: str) -> HFCodec:
    return HFCodec(tokenizer(kind), NAMES[kind], 24, 4, bos="none")


TEXTS = st.lists(st.sampled_from([*WORDS, "unheard"]), max_size=9).map("  ".join)
CODECS = {kind: codec(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_sources_have_the_models_special_tokens_and_are_not_cut(kind: str) -> None:
    made = codec(kind)
    extra = {"bert": 2, "t5": 1, "llama": 1}[kind]
    assert [len(ids) for ids in made.encode_source(["red cat", "the " * 50])] == [2 + extra, 50 + extra]
    assert made.encode_source([]) == []


def test_without_bos_sources_are_those_of_the_released_sapt_code() -> None:
    """Its collator: `tokenizer(text, add_special_tokens=False)` for prompts, and for answers with end-of-sequence."""
    plain, bare = HFCodec(tokenizer("llama"), "decoder", 24, 4), without_bos("llama")
    texts = ["red cat", "the " * 50, "<s> the sea", ""]
    assert bare.encode_source(texts) == bare.tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [[bare.tokenizer.bos_token_id, *ids] for ids in bare.encode_source(texts)] == plain.encode_source(texts)
    assert bare.encode_target(["red cat"]) == plain.encode_target(["red cat"])
    assert bare.fingerprint != plain.fingerprint, "tokenized data must not be shared"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bert", "is 'none' on a backbone of kind encoder, but only decoder-only"),
        ("t5", "is 'none' on a backbone of kind encoder-decoder, but only decoder-only"),
        ("gpt2", "puts no begin-of-sequence token in front of a text: expected bos=tokenizer"),
    ],
)
def test_where_no_bos_stands_none_can_be_left_out(kind: str, said: str) -> None:
    with pytest.raises(BackboneError, match=said):
        without_bos(kind)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_answers_end_in_end_of_sequence_and_come_back(kind: str) -> None:
    made = codec(kind)
    ids = made.encode_target(["red cat", "dog"])
    assert [answer[-1] for answer in ids] == [made.eos_id] * 2
    assert [len(answer) for answer in ids] == [3, 2]
    assert made.decode(torch.tensor([[*ids[1], made.eos_id]])) == ["dog"]


def test_an_encoder_has_no_answers() -> None:
    assert codec("bert").encode_target(["red", "blue"]) == [[], []]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, tokens=st.integers(-1, 12))
def test_clip_gives_the_longest_prefix_that_fits(kind: str, text: str, tokens: int) -> None:
    made = CODECS[kind]
    found = made.clip(text, tokens)
    assert text.startswith(found)
    assert found.split() == text.split()[: max(tokens, 0)]


def test_the_pad_id_is_padding_else_unknown() -> None:
    assert codec("bert").pad_id == 0
    made = codec("llama")
    assert made.pad_id == made.tokenizer.unk_token_id


def test_the_fingerprint_changes_with_token_ids() -> None:
    assert codec("t5").fingerprint == codec("t5").fingerprint
    assert len({codec(kind).fingerprint for kind in KINDS}) == 3
    other = tokenizer("t5")
    other.add_tokens(["unheard"])
    assert HFCodec(other, "encoder-decoder", 24, 4).fingerprint != codec("t5").fingerprint


def test_a_tokenizer_without_an_end_cannot_write_answers() -> None:
    with pytest.raises(BackboneError, match="no end-of-sequence token, so answers never end"):
        HFCodec(tokenizer("bert"), "decoder", 24, 4)
