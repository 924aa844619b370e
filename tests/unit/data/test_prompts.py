"""Prompt templates, word for word."""

from __future__ import annotations

import pytest

from raycl.bank.manifest import TaskInfo
from raycl.data.prompts import Prompt, chat, llama2_chat, long, naming_labels, olora, superni, trace
from raycl.data.sources.conversation import Message, text_of


def test_superni() -> None:
    assert superni("Do.").around("x") == "Definition: Do.\n\nNow complete the following example -\nInput: x\nOutput: "
    assert superni("").around("x") == "Now complete the following example -\nInput: x\nOutput: "


def test_long_has_no_prefix_without_a_definition() -> None:
    assert long("Do.").around("x") == "Do.\nx\nOutput: "
    assert long("").around("x") == "x\nOutput: "


def test_olora_names_the_dataset_only_on_request() -> None:
    assert olora("Choose.", ["A", "B"]).around("x") == "Choose.\nOption: A, B \nx\nAnswer:"
    named = olora("Choose.", ["A", "B"], "TC", "agnews", prompt_names=True)
    assert named.around("x") == "Task:TC\nDataset:agnews\nChoose.\nOption: A, B \nx\nAnswer:"


def test_olora_copa_has_neither_instruction_nor_options() -> None:
    assert olora("", ["A", "B"]).around("x") == "x\nAnswer:"


def test_trace() -> None:
    prompt = trace("Solve the following math problem.", ("Question:\n", "\nAnswer:"))
    assert prompt.around("1 + 1?") == "Solve the following math problem.\nQuestion:\n1 + 1?\nAnswer:"
    assert prompt.instruction == "Solve the following math problem."
    assert trace("", ("", "")).around("x") == "x"  # Py150


def test_llama2_chat() -> None:
    assert llama2_chat("Be kind.").around("x") == "[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nx [/INST] "
    assert llama2_chat("").around("x") == "[INST] x [/INST] "


def test_braces_in_data_stay_braces() -> None:
    assert long("Fill {0} and {x}.").around("{y}") == "Fill {0} and {x}.\n{y}\nOutput: "
    assert Prompt().around("{}") == "{}"


@pytest.mark.parametrize(
    ("instruction", "labels", "expected"),
    [
        ("", ("yes", "no"), "Answer with one of: yes, no"),
        ("Judge the text.\n", ("good", "bad"), "Judge the text.\nAnswer with one of: good, bad"),
        ("Is it Good or bad?", ("good", "bad"), "Is it Good or bad?"),
        ("Nothing is said of it.", ("no", "is"), "Nothing is said of it.\nAnswer with one of: no, is"),
        ("Rate it (C++ or C).", ("C", "C++"), "Rate it (C++ or C)."),
        ("Write.", (), "Write."),
    ],
)
def test_an_instruction_names_all_labels(instruction: str, labels: tuple[str, ...], expected: str) -> None:
    assert naming_labels(instruction, labels) == expected


def test_an_instruction_is_the_system_message_or_stands_before_the_first_text() -> None:
    assert chat("Judge.", "any", "system").messages("x") == (Message("system", "Judge."), Message("user", "x"))
    asked, said = Message("user", "Judge.\n\nx"), (Message("assistant", "good"), Message("user", "y"))
    prompt = chat("Judge.\n", "any", "user")
    assert prompt.messages("x") == (asked,) and prompt.instruction == "Judge.\n"
    assert prompt.messages(text_of([Message("user", "x"), *said])) == (asked, *said)
    other = Message("system", "Be brief.")
    assert prompt.messages(text_of([other, Message("user", "x")])) == (other, asked)
    assert Prompt.of(TaskInfo(name="task", **prompt.record())) == prompt
    assert chat("", "any", "user") == chat("", "any", "system") == Prompt(chat_template="any")
