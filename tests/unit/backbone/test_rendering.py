"""A chat template of another author can neither hold up nor end the process that asks for a conversation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from impatient import RENDERING_S, impatient

from raycl.backbone.markup import render_process
from raycl.backbone.markup.chat_templates import CHATML, TOKENS, check
from raycl.backbone.markup.rendering import Renderer, renderer

CHAT = (("user", "the sky is"),)
TOO_LONG, TOO_LARGE, TOO_MUCH = (
    f"more than {RENDERING_S} s of CPU",
    "more than 512 MiB|MemoryError|OverflowError",
    "expected at most",
)
DOUBLED = "{% set x = namespace(y='ab') %}{% for i in range(60) %}{% set x.y = x.y ~ x.y %}{% endfor %}{{ x.y }}"
POWER = "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}"
"""The one of constants is computed when a template is compiled, this one when it is rendered."""
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "filters": ("{{ range(99999) | map('center', 9999) | map('length') | sum }}" * 99, TOO_LONG),
    "a power of constants": ("{{ 9 ** (9 ** 9) }}", TOO_LONG),
    "text times a number": ("{{ 'a' * 10 ** 10 }}", TOO_LARGE),
    "doubled text": (DOUBLED, f"{TOO_LONG}|{TOO_LARGE}"),
    "much text": ("{{ 'a' * 10 ** 6 }}", "it writes 1,000,000 characters, expected at most 262,184"),
    "much text in a loop": ("{% for a in range(99999) %}{{ 'abc' }}{% endfor %}", TOO_MUCH),
    "a division": ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    "a macro without end": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "deep brackets": ("{{ " + "(" * 10**5 + ")" * 10**5 + " }}", "RecursionError|status -11"),
    "an attribute": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' .* is unsafe"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "no text": ("{{ '\\ud800' }}", "surrogates not allowed"),
    "no template": ("{% for a in %}", "Expected an expression"),
    "its own refusal": ("{{ raise_exception('no' * 10 ** 6) }}", "^no(no){149}$"),
}


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """It is ended sooner; `tests/integration/test_hostile_templates.py` waits for the second that the product gives."""
    with impatient(render_process, RENDERING_S, tmp_path_factory.mktemp("program")):
        yield


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_fails_alone_and_at_once(name: str) -> None:
    template, problem = HOSTILE[name]
    began = time.process_time()
    (rendered,) = renderer().render(template, TOKENS, [(CHAT, True)])
    with pytest.raises(ValueError, match=problem):
        raise ValueError(rendered.problem)
    (after,) = renderer().render(CHATML, TOKENS, [(CHAT, True)])
    assert after.text == "<|im_start|>user\nthe sky is<|im_end|>\n<|im_start|>assistant\n"
    assert time.process_time() - began < 1, "the work is done elsewhere"


def test_a_template_that_loops_on_long_conversations_alone_is_found_too() -> None:
    loops = "{% if messages | length > 3 %}" + LOOPS + "{% endif %}" + CHATML
    refuses = "{% if messages | length > 3 %}{{ raise_exception('one turn') }}{% endif %}" + CHATML
    check(refuses, "be warm")
    with pytest.raises(ValueError, match=rf"of system, user, assistant, .*: it takes {TOO_LONG}"):
        check(loops, "be warm")


def test_the_answers_end_with_the_first_problem_and_long_conversations_are_no_problem() -> None:
    wanted = [(CHAT, True), ([("user", "the sky is " * 10**5)], True), ([("user", "")], True), (CHAT, True)]
    template = CHATML + "{% if not messages[0].content %}{{ 1 / 0 }}{% endif %}"
    rendered = renderer().render(template, TOKENS, wanted)
    assert [bool(item.problem) for item in rendered] == [False, False, True] and not rendered[2].ended
    assert len(rendered[1].text) > 10**6


def test_threads_get_their_own_answers() -> None:
    def is_answered(number: int) -> bool:
        template = POWER if number == 16 else CHATML
        (rendered,) = renderer().render(template, TOKENS, [([("user", str(number))], False)])
        if number == 16:
            return rendered.ended and TOO_LONG in rendered.problem
        return f"user\n{number}<" in rendered.text

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(is_answered, range(1, 33)))


def test_the_process_knows_no_secret_and_ends_with_the_one_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "k3y")
    mine = Renderer()
    (rendered,) = mine.render(CHATML, {}, [(CHAT, True)])
    assert rendered.text and mine._process is not None
    process = mine._process
    assert b"k3y" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert Path(f"/proc/{process.pid}/cwd").readlink() == Path("/")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    process.stdout.close()
