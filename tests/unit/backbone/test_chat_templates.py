"""Conversations as ids: what a run trains on is what the tokenizer makes of the whole conversation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import WORDS

from raycl.backbone.codec import CHATML, HFCodec, template_source
from raycl.backbone.load import BackboneConfig
from raycl.bench.gpu.tiny import word_tokenizer
from raycl.data.conversation import Message, messages_of, text_of
from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.errors import BackboneError

ROLES = ("system", "user", "assistant", "model")
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start> {{ 'model' if m['role'] == 'assistant' else m['role'] }} "
    "{{ m['content'] | trim }} <end> {% endfor %}{% if add_generation_prompt %}<start> model {% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif m['role'] == 'user' %}{{ bos_token }} user {{ m['content'] }} assistant "
    "{% else %}{{ m['content'] }} {{ eos_token }} {% endif %}{% endfor %}"
)
CHAT = (Message("user", "the sky is"), Message("assistant", "blue"), Message("user", "the fire is"))


def codec(template: str, special: tuple[str, ...] = (), eos: str | None = None, kind: str = "llama") -> HFCodec:
    tokenizer = word_tokenizer(kind, (*WORDS, *ROLES, "<|im_start|>", "<|im_end|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special), **({"eos_token": eos} if eos else {})})
    tokenizer.chat_template = template
    return HFCodec(tokenizer, "decoder" if kind == "llama" else "encoder-decoder", 24, 4)


@pytest.mark.parametrize(
    ("template", "special", "eos"),
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (GEMMA, ("<start>", "<end>"), None),
        (LLAMA, (), None),
    ],
    ids=["chatml", "gemma", "llama"],
)
def test_source_and_target_are_the_ids_of_the_whole_conversation(
    template: str, special: tuple[str, ...], eos: str | None
) -> None:
    made = codec(template, special, eos)
    (source,) = made.encode_chat([CHAT], made.chat_template)
    (target,) = made.encode_chat_answers([CHAT], ["red"], made.chat_template)
    messages = [message._asdict() for message in (*CHAT, Message("assistant", "red"))]
    whole = made.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    ending = [] if whole[-1] == made.eos_id else [made.eos_id]
    assert source + target == [*whole, *ending]
    assert made.tokenizer.decode(target, skip_special_tokens=True).split() == ["red"], "an answer shows no markup"


def test_an_end_of_turn_that_is_no_special_token_is_not_learned() -> None:
    made = codec(CHATML)
    (target,) = made.encode_chat_answers([CHAT], ["red"], CHATML)
    assert made.shown(target).split() == ["red", made.tokenizer.eos_token]


def test_an_encoder_gets_its_special_tokens_around_the_conversation() -> None:
    made = codec(CHATML, kind="t5")
    assert made.encode_chat([CHAT], CHATML)[0][-1] == made.eos_id
    assert made.encode_chat([], CHATML) == []


def test_what_the_template_refuses_is_one_sentence() -> None:
    made = codec(LLAMA)
    with pytest.raises(BackboneError, match=r"cannot render a conversation of system, user: no system role; repair"):
        made.encode_chat([(Message("system", "the"), Message("user", "sky"))], made.chat_template)


def test_a_long_conversation_loses_its_oldest_turns_then_its_system_message_then_its_end() -> None:
    made = codec(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    turns = [Message(("user", "assistant")[place % 2], "the sky is blue") for place in range(5)]  # type: ignore[arg-type]
    text, prompt = text_of([Message("system", "the the the"), *turns]), Prompt(chat_template=CHATML)
    whole = len(prompt.encode([text], made)[0])
    kept = {}
    for limit in range(8, whole + 1):
        (ids,), cut = fit_sources([text], prompt, made, limit)
        assert len(ids) <= limit and cut == (limit < whole)
        kept[limit] = made.shown(ids).split("<|im_start|>")[1:]
    assert [len(kept[limit]) for limit in (whole, whole - 1, 30, 21, 8)] == [7, 5, 5, 3, 2]
    assert kept[whole - 1][0].split()[:4] == ["system", "the", "the", "the"], "the system message outlives old turns"
    assert kept[8][0].split()[0] == "user" and kept[8][-1].split() == ["assistant"]


def test_the_instruction_is_the_system_message_unless_the_conversation_has_one() -> None:
    prompt = Prompt(chat_template=CHATML, system="the sky")
    assert prompt.messages("is red") == (Message("system", "the sky"), Message("user", "is red"))
    own = text_of([Message("system", "a"), Message("user", "b")])
    assert prompt.messages(own) == messages_of(own)


def test_a_template_is_a_file_or_chatml_and_is_kept_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(LLAMA)
    assert template_source(str(tmp_path / "mine.jinja")) == LLAMA == template_source(LLAMA)
    assert template_source("chatml") == CHATML and template_source(None) is None
    assert BackboneConfig(chat_template="chatml").chat_template == CHATML
    with pytest.raises(
        ValueError, match=r"the chat template 'none.jinja' is no file: expected a Jinja file, or chatml"
    ):
        BackboneConfig(chat_template="none.jinja")
