"""Tests of how texts are read that come without their task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from raycl.data.prompts import Prompt, superni
from raycl.generation.task_prompts import TaskPrompts
from raycl.routing.attention import AttentionRouter
from raycl.routing.router import Router
from raycl.routing.routers import SingleRouter, TextRouter
from raycl.routing.unknown_texts import UnknownRule
from raycl.types import Mixture, RouterText, TextCodec

CHAT = {name: Prompt(chat_template="any", system=f"Sort {name}.\n") for name in ("news", "food")}
OWNERS = {name: (name,) for name in CHAT}
TURNS = dict.fromkeys(CHAT, 2)
LAST_TWO = "<|user|>\nwho won?\n<|assistant|>\nwe\n<|user|>\nand who lost?"


def tasks(
    router: type[Router], prompts: dict[str, Prompt] | None = None, user_turns: Mapping[str, int] = TURNS
) -> TaskPrompts:
    text: RouterText = "input" if router is TextRouter else "prompt"
    return TaskPrompts(router, OWNERS, prompts or CHAT, text, UnknownRule(), user_turns)


def test_a_system_message_reaches_the_router_only_as_a_tasks_instruction() -> None:
    result, asked = tasks(TextRouter), "<|user|>\nwho won?"
    assert result.reading("who won?") == result.reading("who won?")._replace(tasks=None, is_chat=False)
    named = result.reading(f"<|system|>\nSort food.\n{asked}", is_chat=True)
    assert (named.text, named.routed, named.tasks) == ("who won?", "who won?", ("food",))
    other = result.reading(f"<|system|>\nBe brief.\n{asked}", is_chat=True)
    assert (other.text, other.routed) == (f"<|system|>\nBe brief.\n{asked}", "who won?") and other.tasks is None
    both = result.reading(f"<|system|>\nSort food.\n<|system|>\nBe brief.\n{asked}", is_chat=True)
    assert (both.routed, both.tasks) == ("who won?", None), "a client's own before it: no instruction alone"
    pinned = result.reading(other.text, is_chat=True, task="news")
    assert (pinned.routed, pinned.tasks) == (other.text, ("news",)), "as in training"
    plain = tasks(TextRouter, {name: superni(f"Sort {name}.") for name in CHAT})
    prefixed = plain.reading(f"<|system|>\n Sort news. \n{asked}", is_chat=True)
    assert prefixed.tasks == ("news",) and prefixed.for_model(plain.prompts["news"]) == "who won?"
    hidden = plain.reading(other.text, is_chat=True)
    assert plain.seen(hidden) == "who won?" and hidden.for_model(Prompt()) == "Be brief.\nwho won?"


@pytest.mark.parametrize(
    ("user_turns", "task", "routed"),
    [
        ({}, None, "and who lost?"),
        ({}, "news", "and who lost?"),
        ({"food": 2}, "news", "and who lost?"),
        ({"food": 1}, None, "and who lost?"),
        ({"food": 1}, "food", "<|system|>\nBe brief.\n<|user|>\nand who lost?"),
        ({"food": 2}, "food", f"<|system|>\nBe brief.\n{LAST_TWO}"),
        ({"food": 2, "news": 1}, None, LAST_TWO),
        ({"food": 9}, None, f"<|user|>\nhello\n<|assistant|>\nhi\n{LAST_TWO}"),
    ],
)
def test_as_many_turns_reach_the_router_as_the_longest_conversation_had_that_it_was_fitted_on(
    user_turns: Mapping[str, int], task: str | None, routed: str
) -> None:
    whole = f"<|system|>\nBe brief.\n<|user|>\nhello\n<|assistant|>\nhi\n{LAST_TWO}"
    result = tasks(TextRouter, user_turns=user_turns).reading(whole, is_chat=True, task=task)
    assert (result.text, result.routed) == (whole, routed)
    answered = f"{whole}\n<|assistant|>\nthey"
    assert tasks(TextRouter, user_turns=user_turns).reading(answered, is_chat=True, task=task).routed == routed


@pytest.mark.parametrize(
    ("prompts", "is_chat", "answers", "expected"),
    [
        (CHAT, True, "text", "own"),
        (CHAT, False, "text", "own"),
        ({name: superni(name) for name in CHAT}, True, "text", "own"),
        ({name: superni(name) for name in CHAT}, False, "text", ""),
        ({name: superni(name) for name in CHAT}, True, "label", ""),
    ],
)
def test_without_a_task_turns_get_the_models_own_template(
    prompts: dict[str, Prompt], is_chat: bool, answers: str, expected: str
) -> None:
    result = tasks(TextRouter, prompts)
    codec = cast(TextCodec, SimpleNamespace(chat_template="own", needs_labels=answers == "label"))
    reading = result.reading("who won?", is_chat)
    assert result.prompt_of("", reading, codec) == Prompt(chat_template=expected)
    assert result.prompt_of("other", reading, codec) == Prompt(chat_template=expected), "an adapter's unknown task"
    assert result.prompt_of("food", reading, codec) == prompts["food"]


@pytest.mark.parametrize(
    ("router", "system", "passes"),
    [
        (AttentionRouter, "", [["", ""], ["food", "news"]]),
        (AttentionRouter, "Sort news.", [["news", "news"]]),
        (TextRouter, "", [["", ""]]),
        (SingleRouter, "", [["", ""]]),
    ],
)
def test_prompts_are_chosen_by_the_largest_weight(router: type[Router], system: str, passes: list[list[str]]) -> None:
    result, seen = tasks(router), []
    head = f"<|system|>\n{system}\n<|user|>\n" if system else ""
    readings = [result.reading(f"{head}{text}", is_chat=True) for text in ("soup", "war")]

    def mixture_of(names: Sequence[str]) -> Mixture:
        seen.append(list(names))
        return Mixture(("news", "food"), torch.tensor([[0.4, 0.6], [0.7, 0.3]]))

    _, names = result.route(readings, mixture_of)
    assert seen == passes
    assert names == {"Sort news.": ["news", "news"], "": ["food", "news"]}[system] if router.chooses else ["", ""]


@pytest.mark.parametrize(
    ("by_text", "expected"),
    [
        ([[0.9, 0.1], [0.8, 0.2], [0.9, 0.1]], ["news", "news", "food"]),
        ([[0.0, 0.0], [0.2, 0.8], [0.0, 0.0]], ["food", "food", "food"]),
    ],
)
def test_a_text_without_a_prompt_gets_the_one_that_its_words_speak_for(
    by_text: list[list[float]], expected: list[str]
) -> None:
    """The mixture stays the attention's; an instruction that is given says more than words."""
    result, names = tasks(AttentionRouter), ("news", "food")
    texts = ("soup", "war", "<|system|>\nSort food.\n<|user|>\nwho won?")
    alone = Mixture(
        names, torch.tensor([[0.4, 0.6], [0.7, 0.3], [0.5, 0.5]]), by_text=Mixture(names, torch.tensor(by_text))
    )
    second = Mixture(names, torch.tensor([[0.1, 0.9]] * 3))
    seen: list[list[str]] = []

    def mixture_of(prompts: Sequence[str]) -> Mixture:
        seen.append(list(prompts))
        return second if len(seen) == 2 else alone

    readings = [result.reading(text, is_chat=True) for text in texts]
    assert result.route(readings, mixture_of) == (second, expected)
    assert seen == [["", "", "food"], expected]


def test_one_prompt_for_all_is_known_at_once() -> None:
    result = tasks(AttentionRouter, dict.fromkeys(CHAT, superni("")))
    names = ("news", "food")
    mixture = Mixture(names, torch.tensor([[0.0, 1.0]]), by_text=Mixture(names, torch.tensor([[1.0, 0.0]])))
    seen: list[Sequence[str]] = []
    assert result.route([result.reading("soup")], lambda names: seen.append(names) or mixture)[1] == ["food"]
    assert seen == [["news"]], "read once, in the prompt of any task"
