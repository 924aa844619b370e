"""Training's prompt is serving's, token for token, for every chat template and family of tokenizers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
from chat_samples import CONTROL, TEMPLATES, TOKENIZERS, chat_codec
from transformers import AutoTokenizer

from raycl.backbone.codec import HFCodec
from raycl.bank.manifest import TaskInfo
from raycl.data.prompts import Prompt
from raycl.data.stream import StreamConfig, TaskSpec, open_stream
from raycl.errors import ConfigError
from raycl.serve.engine.truncation import PromptRequest, Truncation
from raycl.serve.http.schema import ChatRequest

LIMIT = 60
"""Tokens of a prompt, which the longest conversation exceeds."""


def conversation(number: int, system: bool, special: str) -> list[dict[str, Any]]:
    """Messages of one to six turns, some with white space around them, an empty one, and strings of special tokens."""
    turns = []
    for turn in range(1 + number % 6):
        said = f"the {['sky', 'sea', 'fire'][turn % 3]} is{special if turn == 1 else ''} {number}"
        answer = "" if (number + turn) % 5 == 4 else f"\n very blue{special if number == 3 else ''} \n"
        turns += [{"role": "user", "content": f" {said}\n"}, {"role": "assistant", "content": answer}]
    return [{"role": "system", "content": "be warm"}, *turns] if system and number % 2 else turns


def compare(codec: HFCodec, folder: Path) -> None:
    """Check that every row's prompt in training is what serving reads for the messages before its answer."""
    system = "no system role" not in codec.chat_template
    special = f"{codec.tokenizer.eos_token}{CONTROL[0]}"
    chats = [conversation(number, system, special) for number in range(8)]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    task = TaskSpec(name="chat", path=str(folder))
    config = StreamConfig(tasks=(task,), dev_fraction=0, max_source_tokens=LIMIT, cache_dir=str(folder / "cache"))
    stream = open_stream(config, seed=0)
    table, prompt = stream.table(stream.tasks[0], "train", codec), stream.prompt(stream.tasks[0], codec)
    kept = TaskInfo.model_validate_json(TaskInfo(name="chat", **prompt.record()).model_dump_json())
    asked = [chat[: index + 1] for chat in chats for index, item in enumerate(chat) if item["role"] == "user"]
    bodies = [ChatRequest.model_validate({"model": "auto", "messages": messages}) for messages in asked]
    wanted = [PromptRequest(body.prompt, Prompt.of(kept), is_input=True, ahead=0) for body in bodies]
    served = [item.ids for item in Truncation(codec, None, LIMIT, 4096).fit(wanted)]
    columns = table.columns(range(len(table)))
    assert [ids.tolist() for ids in columns.source_ids] == served
    assert table.truncated_sources > 0 and max(map(len, served)) <= LIMIT
    answers = [names[0] for names in table.references(range(len(table)))]
    targets = [ids.tolist() for ids in columns.target_ids]
    assert stream.answer_ids(stream.tasks[0], answers, codec) == targets, "what evaluation keeps answers to"
    texts = table.texts(range(len(table)))
    plain = [text.replace(special, "") for text in texts]
    assert texts != plain and controls(prompt.encode(texts, codec), codec) == controls(
        prompt.encode(plain, codec), codec
    )


def controls(rows: list[list[int]], codec: HFCodec) -> list[list[int]]:
    """Return the special tokens of each row, which are the template's."""
    kept = codec.special_ids - {codec.tokenizer.unk_token_id}
    return [[number for number in ids if number in kept] for ids in rows]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_prompt_in_training_is_that_of_the_endpoint(tokenizer: str, template: str, tmp_path: Path) -> None:
    compare(chat_codec(tokenizer, template), tmp_path)


def test_prompts_of_shared_models_under_shared_templates(shared: Path, tmp_path: Path) -> None:
    """The models whose tokenizers are there: that of the second is large, and not in every copy of the folder."""
    folders = [shared / "models" / name for name in ("mini-llama", "smollm2-135m")]
    present = [folder for folder in folders if (folder / "tokenizer.json").is_file()]
    files = sorted((shared / "cases" / "data").glob("*.jinja"))
    if not present or not files:
        pytest.skip(f"no tokenizer in {folders[0]}, or no chat templates in {shared / 'cases' / 'data'}")
    for folder, file in product(present, files):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": [*CONTROL, "<|start|>", "<|eot|>", "<|im_start|>"]})
        template = file.read_text().replace("System role not supported", "no system role")
        own = tmp_path / folder.name / file.stem
        own.mkdir(parents=True)
        compare(HFCodec(tokenizer, "decoder", 200, 40, template), own)


@pytest.mark.parametrize("template", ["trims", "no-system"])
@pytest.mark.parametrize("turn", ["system", "user"])
def test_labels_are_named_where_the_settings_say(
    template: str, turn: Literal["system", "user"], tmp_path: Path
) -> None:
    """They are as the template writes them; the error for one that refuses system messages names the other place."""
    codec = chat_codec("bytes", template)
    for split in ("train", "test"):
        rows = [{"text": f"it is {number}", "label": ["warm", "cold"][number % 2]} for number in range(6)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskSpec(name="weather", path=str(tmp_path), definition="How is it?", labels=("warm", "cold"))
    settings = {"dev_fraction": 0, "prompt": "chat", "instruction_turn": turn, "cache_dir": str(tmp_path / "cache")}
    for lists, instruction in ((True, "How is it?\nAnswer with one of: warm, cold"), (False, "How is it?")):
        stream = open_stream(StreamConfig(tasks=(task,), list_labels=lists, **settings), seed=0)
        if (template, turn) == ("no-system", "system"):
            with pytest.raises(ConfigError, match=r"no system role; .* \(stream.instruction_turn=user\)"):
                stream.check(codec)
            continue
        table, (text, *_) = stream.table(stream.tasks[0], "train", codec), ["it is 0"]
        said = {"system": [("system", instruction), ("user", text)], "user": [("user", f"{instruction}\n\n{text}")]}
        messages = [{"role": role, "content": content} for role, content in said[turn]]
        wanted = codec.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert table.columns([0]).source_ids[0].tolist() == wanted
        assert stream.instruction(stream.tasks[0], codec) == instruction
