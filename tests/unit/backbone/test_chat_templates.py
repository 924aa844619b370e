"""Conversations as ids: what a run trains on is what the tokenizer makes of the whole conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_samples import TEMPLATES, TOKENIZERS, TOOL_TEMPLATES, chat_codec
from tiny import WORDS

from raycl.backbone.codec import HFCodec
from raycl.backbone.load import BackboneConfig
from raycl.backbone.markup.chat_templates import CHATML, template_source, with_template_files
from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.data.sources.conversation import Message, Role, answer_text, messages_of, text_of
from raycl.data.stream import StreamConfig, TaskSpec, open_stream
from raycl.errors import BackboneError, ConfigError, ConversationError, DataError
from raycl.testing.tiny_models import word_tokenizer
from raycl.training.setup.run_config import from_tree

ROLES = ("system", "user", "assistant", "model")
LLAMA = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif m['role'] == 'user' %}{{ bos_token }} user {{ m['content'] }} assistant "
    "{% else %}{{ m['content'] }} {{ eos_token }} {% endif %}{% endfor %}"
)
SILENT = "{% for m in messages if m['content'] %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
LATE = SILENT + "{% if add_generation_prompt %}{{ 'assistant <think>' }}{% endif %}"
CHAT = (Message("user", "the sky is"), Message("assistant", "blue"), Message("user", "the fire is"))


def codec(template: str, special: tuple[str, ...] = (), eos: str | None = None, kind: str = "llama") -> HFCodec:
    tokenizer = word_tokenizer(kind, (*WORDS, *ROLES, "<|im_start|>", "<|im_end|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special), **({"eos_token": eos} if eos else {})})
    tokenizer.chat_template = template
    return HFCodec(tokenizer, "decoder" if kind == "llama" else "encoder-decoder", 24, 4)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("answer", ["red", "very\nblue\n", ""])
def test_source_and_target_are_the_ids_of_the_conversation_up_to_the_end_of_the_turn(
    tokenizer: str, template: str, answer: str
) -> None:
    made = chat_codec(tokenizer, template)
    (source,) = made.encode_chat([CHAT], made.chat_template)
    (target,) = made.encode_chat_answers([CHAT], [[("assistant", answer)]], made.chat_template)
    messages = [message._asdict() for message in (*CHAT, Message("assistant", answer))]
    whole = made.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    before = made.tokenizer.apply_chat_template(
        messages[:-1], tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert source[: len(before)] == before and target[-1] == made.eos_id
    joined = source + (target if whole[-1] == made.eos_id else target[:-1])
    assert whole[: len(joined)] == joined and not made.tokenizer.decode(whole[len(joined) :]).strip()
    assert made.decode([target])[0].split() == made.decode([made.encode_target([answer])[0]])[0].split()
    assert (template == "thinks") == ("</think>" in made.shown(source)), "what each answer begins with is prompt"


@pytest.mark.parametrize(
    ("template", "answer", "said"),
    [
        (LATE, "red", r"begins the turn of an answer with '.*assistant ' and ends its generation prompt with '.*think"),
        (
            TEMPLATES["thinks"],
            "<think>warm</think>red",
            r"rewrites the answer '<think>warm</think>red' to 'warm</think>",
        ),
        (SILENT, "", r"rewrites the answer '' to ''"),
    ],
    ids=["another-beginning", "another-block", "no-turn"],
)
def test_a_template_that_rewrites_a_turn_is_refused_with_the_row(
    template: str, answer: str, said: str, tmp_path: Path
) -> None:
    made = chat_codec("words", "thinks")
    rows = [{"messages": [message._asdict() for message in (*CHAT, Message("assistant", "red"))]} for _ in range(3)]
    rows[2]["messages"][-1]["content"] = answer
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskSpec(name="chat", path=str(tmp_path))
    stream = open_stream(StreamConfig(tasks=(task,), dev_fraction=0, cache_dir=str(tmp_path / "cache")), seed=0)
    made.chat_template = template
    where = "task 'chat'" if template == LATE else "train.jsonl, row 3"
    with pytest.raises((ConfigError, DataError), match=rf"(?s){where}: the chat template .* {said}"):
        stream.table(stream.tasks[0], "train", made)


TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
CALLS = '[{"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "sky"}}}]'
RESULT = '{"content": "warm", "tool_call_id": "abcdefghi"}'
CALLED = (Message("assistant", ""), Message("tool_calls", CALLS))


@pytest.mark.parametrize("template", TOOL_TEMPLATES)
@pytest.mark.parametrize("tokenizer", ["bytes", "pieces"])
def test_calls_of_tools_are_targets_and_results_are_sources(tokenizer: str, template: str) -> None:
    """Both are what the tokenizer makes of the whole conversation."""
    made = chat_codec(tokenizer, template)
    asked = [Message("tools", TOOLS), Message("user", "the sky is")]
    calls = json.loads(CALLS)
    named: list[dict[str, Any]] = [
        {"role": "user", "content": "the sky is"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", **json.loads(RESULT)},
        {"role": "assistant", "content": "warm"},
    ]
    settings = {"tools": json.loads(TOOLS), "return_dict": False}
    for messages, answer, before in (
        (asked, CALLED, named[:1]),
        ([*asked, *CALLED, Message("tool", RESULT)], (Message("assistant", "warm"),), named[:3]),
    ):
        (source,) = made.encode_chat([messages], made.chat_template)
        (target,) = made.encode_chat_answers([messages], [answer], made.chat_template)
        assert source == made.tokenizer.apply_chat_template(before, add_generation_prompt=True, **settings)
        whole = made.tokenizer.apply_chat_template(named[: len(before) + 1], **settings)
        joined = source + (target if whole[-1] == made.eos_id else target[:-1])
        assert whole[: len(joined)] == joined and not made.tokenizer.decode(whole[len(joined) :]).strip()
        assert target[-1] == made.eos_id and ("weather" in made.shown(target)) == (answer == CALLED)
        prompt = Prompt(chat_template=made.chat_template)
        (written,) = prompt.as_generated([text_of(messages)], [[answer_text(answer)]], made)
        assert written == [made.decode([target])[0]]


@pytest.mark.parametrize("template", ["trims", "no-system", "thinks"])
def test_a_template_that_cannot_render_tools_is_refused_with_the_row(template: str, tmp_path: Path) -> None:
    rows = [{"messages": [message._asdict() for message in (*CHAT, Message("assistant", "red"))]} for _ in range(3)]
    rows[1]["tools"] = json.loads(TOOLS)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"dev_fraction": 0, "cache_dir": str(tmp_path / "cache"), "max_source_tokens": 200}
    stream = open_stream(StreamConfig(tasks=(TaskSpec(name="chat", path=str(tmp_path)),), **settings), seed=0)
    said = r"train.jsonl, row 2: the chat template of the tokenizer does not render tools, .* backbone.chat_template"
    with pytest.raises(DataError, match=said):
        stream.table(stream.tasks[0], "train", chat_codec("bytes", template))


def test_tools_calls_and_results_are_not_cut() -> None:
    made = chat_codec("bytes", "in-tags")
    prompt = Prompt(chat_template=made.chat_template)
    last = [Message("user", "the fire is " * 9), *CALLED, Message("tool", RESULT)]
    offers = [Message("system", "runs warm " * 9), Message("tools", TOOLS)]
    messages = [*offers, *CHAT[:2], *last]
    (least,) = made.encode_chat([[offers[1], last[0]._replace(content=""), *last[1:]]], made.chat_template)
    (whole,) = made.encode_chat([messages], made.chat_template)
    for limit in (len(least) - 5, len(least) + 5, len(whole) - 5):
        if limit < len(least):
            with pytest.raises(ConversationError, match="send fewer messages, tools or shorter results"):
                fit_sources([text_of(messages)], prompt, made, limit)
            continue
        (ids,), (cut,), _ = fit_sources([text_of(messages)], prompt, made, limit)
        shown = made.shown(ids)
        assert len(ids) <= limit and cut and "blue" not in shown, shown
        assert '"name": "weather"' in shown and '{"city": "sky"}' in shown and "warm" in shown.rpartition("tool\n")[2]


def test_an_end_of_turn_that_is_no_special_token_is_not_learned() -> None:
    made = codec(CHATML)
    (target,) = made.encode_chat_answers([CHAT], [[("assistant", "red")]], CHATML)
    assert made.shown(target).split() == ["red", made.tokenizer.eos_token]


def test_an_encoder_gets_its_special_tokens_around_the_conversation() -> None:
    made = codec(CHATML, kind="t5")
    assert made.encode_chat([CHAT], CHATML)[0][-1] == made.eos_id
    assert made.encode_chat([], CHATML) == []


def test_what_the_template_refuses_is_one_sentence() -> None:
    made = codec(LLAMA)
    with pytest.raises(
        BackboneError, match=r"render a conversation of system, user: no system role; change the messages"
    ):
        made.encode_chat([(Message("system", "the"), Message("user", "sky"))], made.chat_template)


def test_a_long_conversation_loses_its_oldest_turns_then_its_system_message_then_its_end() -> None:
    made = codec(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    turns = [Message(("user", "assistant")[index % 2], "the sky is blue") for index in range(5)]  # type: ignore[arg-type]
    text, prompt = text_of([Message("system", "the the the"), *turns]), Prompt(chat_template=CHATML)
    whole = len(prompt.encode([text], made)[0])
    kept = {}
    for limit in range(8, whole + 1):
        (ids,), cut, _ = fit_sources([text], prompt, made, limit)
        assert len(ids) <= limit and cut == [whole - limit] * (limit < whole)
        kept[limit] = made.shown(ids).split("<|im_start|>")[1:]
    assert [len(kept[limit]) for limit in (whole, whole - 1, 30, 21, 8)] == [7, 5, 5, 3, 2]
    assert kept[whole - 1][0].split()[:4] == ["system", "the", "the", "the"], "the system message outlives old turns"
    assert kept[8][0].split()[0] == "user" and kept[8][-1].split() == ["assistant"]


PERSONA = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system the sky is very much blue<|im_end|> {% endif %}"
    + CHATML
)
"""It introduces the assistant where no system message does, as many public ones."""

LONG = "the sky is very much blue the sea is cold"
SHAPES: dict[str, tuple[Role, ...]] = {
    "alternating": ("user", "assistant", "user", "assistant", "user"),
    "without-answers": ("user", "user", "user"),
    "ends-with-assistant": ("user", "assistant", "user", "assistant"),
    "begins-with-assistant": ("assistant", "user"),
    "late-system": ("user", "assistant", "system", "user"),
    "assistant-alone": ("assistant", "assistant"),
    "alone": ("user",),
    "system-alone": ("system",),
}


@pytest.mark.parametrize("system", ["", "a dog runs very cold"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_conversation_can_be_cut_to_any_length(shape: str, system: str) -> None:
    """Turns are left out whole, oldest first, and as few as fit: the template's own tokens count."""
    made = codec(PERSONA, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    turns = [Message(role, f"a cat {LONG}") for role in SHAPES[shape]]
    head = [Message("system", system)] if system else []
    prompt, text = Prompt(chat_template=PERSONA, system="warm sea " * 3), text_of([*head, *turns])
    whole = len(prompt.encode([text], made)[0])
    starts = [number for number, role in enumerate(SHAPES[shape]) if role == "user" or not number]
    lengths = {start: len(prompt.encode([text_of([*head, *turns[start:]])], made)[0]) for start in starts}
    for limit in range(30 if shape != "late-system" else 36, whole):
        (ids,), cut, _ = fit_sources([text], prompt, made, limit)
        assert len(ids) <= limit and cut == [whole - limit]
        kept = next((start for start in starts if lengths[start] <= limit), None)
        if kept is not None:
            assert ids == prompt.encode([text_of([*head, *turns[kept:]])], made)[0]


def test_a_system_message_that_is_cut_away_is_not_replaced() -> None:
    """Neither by the template's persona nor by the task's instruction; an empty one stays what it is."""
    made = codec(PERSONA, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    prompt = Prompt(chat_template=PERSONA, system="warm " * 8)
    text = text_of([Message("system", "cold " * 8), Message("user", f"{LONG} {LONG}")])
    for limit in range(12, 30):
        (ids,), *_ = fit_sources([text], prompt, made, limit)
        shown = made.shown(ids)
        assert len(ids) <= limit and shown.startswith("<|im_start|> system") and "warm" not in shown
        assert "much" not in shown.partition("user")[0] and shown.endswith("<|im_start|> assistant")
    (empty,) = prompt.encode([text_of([Message("system", ""), Message("user", "a")])], made)
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]
    assert empty == made.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_the_instruction_is_the_system_message_unless_the_conversation_has_one() -> None:
    prompt = Prompt(chat_template=CHATML, system="the sky")
    assert prompt.messages("is red") == (Message("system", "the sky"), Message("user", "is red"))
    own = text_of([Message("system", "a"), Message("user", "b")])
    assert prompt.messages(own) == messages_of(own)


def test_a_template_is_a_file_or_chatml_and_is_kept_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(LLAMA)
    named = {"chat_template": str(tmp_path / "mine.jinja")}
    given = {"backbone": named, "method": {"generator": {"backbone": named}}, "seed": 3}
    read = {"chat_template": LLAMA}
    assert with_template_files(given) == {"backbone": read, "method": {"generator": {"backbone": read}}, "seed": 3}
    assert template_source(LLAMA) == LLAMA
    assert template_source("chatml") == CHATML and template_source(None) is None
    assert BackboneConfig(chat_template="chatml").chat_template == CHATML
    with pytest.raises(ConfigError, match=r"template 'none.jinja' is no file: expected a Jinja file, or chatml"):
        from_tree({"backbone": {"chat_template": "none.jinja"}})
    (tmp_path / "mine.jinja").write_bytes("{{ 'ä' }}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine\.jinja' cannot be read \(.*\): expected a readable file in UTF-8"):
        from_tree({"backbone": named})


def test_a_record_names_no_file_and_no_other_file_is_taken_for_a_template(tmp_path: Path) -> None:
    """A template that is read is copied into the bank, so a file of another name or size is refused."""
    (tmp_path / "secret.txt").write_text("k3y")
    (tmp_path / "large.jinja").write_text("k3y" * 2**19)
    for name in ("secret.txt", "large.jinja"):
        with pytest.raises(
            ConfigError, match=r"expected a template of up to 1,048,576 bytes whose name ends in \.jinja"
        ):
            from_tree({"backbone": {"chat_template": str(tmp_path / name)}})
        with pytest.raises(ValueError, match="is no Jinja source"):
            BackboneConfig(chat_template=str(tmp_path / name))
