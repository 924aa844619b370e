"""Prompt templates: the text before and after an input text.

Each paper wraps its inputs differently (methods' published prompts), and truncation must cut only the input, so a
template is a pair (prefix, suffix) and never a format string: braces in data stay braces. Inputs that are conversations
get the chat template of a tokenizer instead.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from raycl.data.sources.conversation import (
    Message,
    answer_of,
    has_tool_turns,
    head_of,
    messages_of,
    plain_text,
    text_of,
)
from raycl.errors import ConversationError
from raycl.types import TextCodec


class PromptRecord(Protocol):
    """The record of a prompt in snapshots and configs."""

    @property
    def prompt(self) -> tuple[str, str]: ...
    @property
    def chat_template(self) -> str: ...
    @property
    def system(self) -> str: ...
    @property
    def definition(self) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """The text around an input.

    Attributes:
        chat_template: Jinja source, as tokenizers have it: the text is a conversation that it renders
            (`raycl.data.sources.conversation`), with prefix and suffix around the first message of the user; "": none.
        system: system message of conversations that have none of their own.
        definition: the task's instruction as the prefix has it; "" where there is none.
        shots: examples with their answers, which stand before every input.
    """

    prefix: str = ""
    suffix: str = ""
    chat_template: str = ""
    system: str = ""
    definition: str = ""
    shots: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(record: PromptRecord) -> Prompt:
        return Prompt(*record.prompt, record.chat_template, record.system, record.definition)

    def record(self) -> dict[str, Any]:
        """Return fields of a `PromptRecord`."""
        others = {"chat_template": self.chat_template, "system": self.system, "definition": self.definition}
        return {"prompt": (self.prefix, self.suffix), **others}

    @property
    def instruction(self) -> str:
        """The task's instruction, as the system message or in front of the text; "" where there is none."""
        return self.system or self.definition

    def around(self, text: str) -> str:
        """Return a text between prefix and suffix: the whole prompt of one example, where there is no chat template."""
        return f"{self.prefix}{text}{self.suffix}"

    def written(self, text: str) -> str:
        """Return the whole prompt as a text: of a conversation all contents."""
        if self.chat_template:
            return plain_text(self.messages(text))
        return "".join([*(f"{self.around(shot)}{answer}\n\n" for shot, answer in self.shots), self.around(text)])

    def messages(self, text: str) -> tuple[Message, ...]:
        """Return the messages that the chat template renders."""
        messages = messages_of(text)
        first = next((number for number, message in enumerate(messages) if message.role == "user"), len(messages))
        if self.prefix or self.suffix:
            asked = [message._replace(content=self.around(message.content)) for message in messages[first : first + 1]]
            messages = (*messages[:first], *asked, *messages[first + 1 :])
        if self.shots:
            alone = replace(self, system="", shots=())
            turns = [(*alone.messages(shot), *answer_of(answer)) for shot, answer in self.shots]
            shots = [message for turn in turns for message in turn[len(head_of(turn)) :]]
            messages = (*messages[:first], *shots, *messages[first:])
        if self.system and messages[0].role != "system":
            return (Message("system", self.system), *messages)
        return messages

    def encode(self, texts: Sequence[str], codec: TextCodec) -> list[list[int]]:
        """Return ids of whole prompts, not truncated."""
        if self.chat_template:
            return codec.encode_chat([self.messages(text) for text in texts], self.chat_template)
        return codec.encode_source([self.written(text) for text in texts])

    def encode_answers(self, texts: Sequence[str], answers: Sequence[str], codec: TextCodec) -> list[list[int]]:
        """Return ids of the answers to `texts`, ending in the end-of-sequence id, not truncated."""
        if self.chat_template:
            turns = list(map(answer_of, answers))
            return codec.encode_chat_answers([self.messages(text) for text in texts], turns, self.chat_template)
        return codec.encode_target(answers)

    def as_generated(
        self, texts: Sequence[str], references: Sequence[Sequence[str]], codec: TextCodec
    ) -> list[list[str]]:
        """Return the accepted answers to `texts` as a model generates them: calls of tools as the template writes them.

        Texts alone are as they are in the data.
        """
        written = [list(names) for names in references]
        for row, names in enumerate(references):
            for number, name in enumerate(names):
                turn = answer_of(name)
                if len(turn) > 1:
                    written[row][number] = codec.decode(self.encode_answers([texts[row]], [name], codec))[0]
                else:
                    written[row][number] = turn[0].content
        return written

    def shortened(self, text: str, limit: int, room: int, codec: TextCodec) -> Generator[str, int, str]:
        """Return the longest part of `text` whose prompt has at most `limit` tokens.

        Of a text it is the beginning, of a conversation the end.

        A conversation loses its oldest turns first, then the end of its system message, then that of its last message.
        Tools, calls of them and their results are never cut.

        Args:
            room: tokens that the prompt leaves for a text alone.

        Yields:
            texts to try; what is sent back is the number of tokens of each with its prompt.

        Raises:
            ConversationError: not even a conversation without contents fits.
        """
        messages = messages_of(text)
        if not self.chat_template or messages == (Message("user", text),):
            while (tokens := (yield (shorter := codec.clip(text, room)))) > limit:
                assert room > 0, "check_codec leaves room for text"
                room = max(0, room - (tokens - limit))
            return shorter
        head = tuple(head_of(messages))
        turns, first = messages[len(head) :], head[:1]
        system, tools = (first, head[1:]) if first and first[0].role == "system" else ((), head)
        starts = [0, *(number for number, message in enumerate(turns) if number and message.role == "user")]
        few, many, tokens = 0, len(starts), limit + 1
        while many - few > 1:  # the most exchanges that fit; each begins with a message of the user
            half = (few + many) // 2
            tokens = yield text_of([*head, *turns[starts[-half] :]])
            few, many = (half, many) if tokens <= limit else (few, half)
        if few:
            return text_of([*head, *turns[starts[-few] :]])
        last = (*tools, *turns[starts[-1] :])
        if system:
            content, tokens = yield from _clipped(system, 0, last, limit, codec)
            system = (Message("system", content),)
            if not content:  # without the message, the template or the prompt may write one of their own
                without = yield text_of(last)
                system, tokens = ((), without) if without < tokens else (system, tokens)
        for index in reversed(range(len(last))):
            if tokens > limit and last[index].role in ("user", "assistant"):
                content, tokens = yield from _clipped((*system, *last), len(system) + index, (), limit, codec)
                last = (*last[:index], last[index]._replace(content=content), *last[index + 1 :])
        if tokens <= limit:
            return text_of([*system, *last])
        results = ", tools or shorter results" if has_tool_turns(text) else ""
        raise ConversationError(
            f"a conversation of {len(last)} messages has {tokens} tokens without its contents, and prompts have at "
            f"most {limit} (the run's stream.max_source_tokens): send fewer messages{results}"
        )


def _clipped(
    messages: Sequence[Message], index: int, others: Sequence[Message], limit: int, codec: TextCodec
) -> Generator[str, int, tuple[str, int]]:
    """Return the longest beginning of a message's content with which all messages fit, and the tokens of the prompt.

    The content is empty where they do not fit at all. Texts are tried as in `Prompt.shortened`.
    """
    content = messages[index].content
    tokens = yield text_of([*messages, *others])
    room = len(codec.encode_source([content])[0])
    while tokens > limit and content:
        room -= tokens - limit
        content = codec.clip(messages[index].content, room)
        shorter = messages[index]._replace(content=content)
        tokens = yield text_of([*messages[:index], shorter, *messages[index + 1 :], *others])
    return content, tokens


def chat(instruction: str, template: str, turn: Literal["system", "user"]) -> Prompt:
    """Format a conversation, with the task's instruction as its system message, or before what the user says first."""
    if turn == "system" or not instruction:
        return Prompt(chat_template=template, system=instruction)
    return Prompt(f"{instruction.rstrip()}\n\n", chat_template=template, definition=instruction)


def naming_labels(instruction: str, labels: Sequence[str]) -> str:
    """Return an instruction that names all labels: itself, or else with a line that lists them."""
    if all(re.search(rf"(?<!\w){re.escape(label)}(?!\w)", instruction, re.IGNORECASE) for label in labels):
        return instruction
    return f"{instruction.rstrip()}\nAnswer with one of: {', '.join(labels)}".lstrip()


def superni(definition: str) -> Prompt:
    """Format prompts of SAPT's SuperNI tasks; an empty definition leaves its paragraph out."""
    head = f"Definition: {definition}\n\n" if definition else ""
    return Prompt(f"{head}Now complete the following example -\nInput: ", "\nOutput: ", definition=definition)


def long(definition: str) -> Prompt:
    """Format prompts of SAPT's Long Sequence tasks; an empty definition (copa) leaves nothing before the text."""
    return Prompt(f"{definition}\n" if definition else "", "\nOutput: ", definition=definition)


def olora(
    instruction: str, labels: Sequence[str] | None, group: str = "", dataset: str = "", prompt_names: bool = False
) -> Prompt:
    """Format prompts as O-LoRA and MIGU: instruction and options; no options where there is no instruction (COPA).

    Args:
        prompt_names: write the two lines that name task group and dataset, as the official runs do, **also at
            test**, which gives the task away; off for task-free results.
    """
    names = f"Task:{group}\nDataset:{dataset}\n" if prompt_names else ""
    options = f"Option: {', '.join(labels)} \n" if labels and instruction else ""
    return Prompt(f"{names}{instruction}\n{options}" if instruction else names, "\nAnswer:", definition=instruction)


def trace(instruction: str, around: tuple[str, str]) -> Prompt:
    """Format prompts as the rows of TRACE's release have them; no chat template, for chat models either.

    Args:
        around: text between instruction and input, and behind the input.
    """
    opening, cue = around
    return Prompt(f"{instruction}\n{opening}" if instruction else opening, cue, definition=instruction)


def llama2_chat(instruction: str) -> Prompt:
    """Format Llama-2's chat form as in SLM's LLaMA runs; the system block only where there is an instruction."""
    system = f"<<SYS>>\n{instruction}\n<</SYS>>\n\n" if instruction else ""
    return Prompt(f"[INST] {system}", " [/INST] ", definition=instruction)
