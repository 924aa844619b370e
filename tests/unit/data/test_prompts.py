"""Prompt templates, word for word."""

from __future__ import annotations

from raycl.data.prompts import Prompt, llama2_chat, long, olora, superni


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


def test_llama2_chat() -> None:
    assert llama2_chat("Be kind.").around("x") == "[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nx [/INST] "
    assert llama2_chat("").around("x") == "[INST] x [/INST] "


def test_braces_in_data_stay_braces() -> None:
    assert long("Fill {0} and {x}.").around("{y}") == "Fill {0} and {x}.\n{y}\nOutput: "
    assert Prompt().around("{}") == "{}"
