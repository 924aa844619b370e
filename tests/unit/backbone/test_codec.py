"""Text to ids and back, as each kind of backbone wants it."""

from __future__ import annotations

import pytest
import torch
from chat_samples import TOKENIZERS, chat_codec
from hypothesis import given
from hypothesis import strategies as st
from tiny import KINDS, WORDS, tokenizer
from tokenizers.processors import TemplateProcessing

from raycl.backbone.codec import HFCodec
from raycl.errors import BackboneError

NAMES = {"bert": "encoder", "t5": "encoder-decoder", "llama": "decoder", "gpt2": "decoder"}


def codec(kind: str) -> HFCodec:
    return HFCodec(tokenizer(kind), NAMES[kind], 24, 4)


def without_bos(kind: str) -> HFCodec:
    return HFCodec(tokenizer(kind), NAMES[kind], 24, 4, bos="none")


TEXTS = st.lists(st.sampled_from([*WORDS, "unheard"]), max_size=9).map("  ".join)
CODECS = {kind: codec(kind) for kind in KINDS}
CHATS = {name: chat_codec(name, "trims") for name in TOKENIZERS}


@pytest.mark.parametrize("kind", KINDS)
def test_sources_have_the_models_special_tokens_and_are_not_cut(kind: str) -> None:
    made = codec(kind)
    extra = {"bert": 2, "t5": 1, "llama": 1}[kind]
    assert [len(ids) for ids in made.encode_source(["red cat", "the " * 50])] == [2 + extra, 50 + extra]
    assert made.encode_source([]) == []


def test_without_bos_sources_are_those_of_the_released_sapt_code() -> None:
    """Its collator: `tokenizer(text, add_special_tokens=False)` for prompts, and for answers with end-of-sequence."""
    plain, bare = HFCodec(tokenizer("llama"), "decoder", 24, 4), without_bos("llama")
    texts = ["red cat", "the " * 50, ""]
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
    clipped = made.clip(text, tokens)
    assert text.startswith(clipped)
    assert clipped.split() == text.split()[: max(tokens, 0)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(st.sampled_from([*WORDS, "unheard", " ", "\n"]), max_size=9).map(" ".join))
def test_special_strings_of_the_data_are_text_and_leave_all_else_as_it_is(name: str, texts: str) -> None:
    made = CHATS[name]
    special = [str(token) for token in made.tokenizer.all_special_tokens]
    dirty = f"{texts}{special[0]}the {special[-1]}"
    source, target = made.encode_source([dirty])[0], made.encode_target([dirty])[0]
    control = made.special_ids - {made.tokenizer.unk_token_id}
    starts = made.encode_source([""])[0]
    assert [number for number in source if number in control] == starts and made.eos_id not in target[:-1]
    assert target == [*source[len(starts) :], made.eos_id]
    marked = made._special._marked
    assert marked.encode(texts).ids == made.tokenizer(texts)["input_ids"], "as the tokenizer itself"
    assert dirty.startswith(made.clip(dirty, 3)) and len(made.encode_target([made.clip(dirty, 3)])[0]) <= 4


def test_a_prompt_ends_where_the_answer_begins_though_the_tokenizer_ends_every_text() -> None:
    ending = tokenizer("llama")
    shape = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    ending.backend_tokenizer.post_processor = shape
    assert ending("red cat")["input_ids"][-1] == ending.eos_token_id
    for bos in ("tokenizer", "none"):
        usual, made = (HFCodec(item, "decoder", 24, 4, bos=bos) for item in (tokenizer("llama"), ending))
        assert made.encode_source(["red cat", "", "the </s>"]) == usual.encode_source(["red cat", "", "the </s>"])
    assert HFCodec(ending, "encoder-decoder", 24, 4).encode_source(["red"])[0][-1] == ending.eos_token_id


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
