"""Expressions of sweep files: what they compute, and that nothing else can be said in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycl.errors import ConfigError
from raycl.operations.sweep.definition.expressions import parse

NAMES = {"ap": 70.0, "f_ra": 5.0, "train.learning_rate": 1e-3, "method": "lora", "tasks": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ap - f_ra", 65.0),
        ("ap - 0.5 * f_ra", 67.5),
        ("10 * train.learning_rate", 1e-2),
        ("1e-4 if method == 'finetune' else 1e-3", 1e-3),
        ("method in ['lora', 'olora'] and not ap < 50", True),
        ("max(2, 3) ** 2 // 4 % 5", 2),
        ("1 < 2 < 3 or missing", True),
        ("-min(ap, 3)", -3.0),
        ("[1, 'x', None]", [1, "x", None]),
        ("len(tasks) + int(2.7)", 4),
    ],
)
def test_values(text: str, expected: object) -> None:
    assert parse(text).value(NAMES.__getitem__) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "ap.__class__()",
        "[x for x in tasks]",
        "lambda: 1",
        "(y := 3)",
        "f'{ap}'",
        "tasks[0]",
        "min(*tasks)",
        "min(1, key=2)",
        "b'x'",
        "1j",
        "{1: 2}",
        "ap @ ap",
        "...",
    ],
)
def test_unsupported_syntax_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not allowed"):
        parse(text)


@pytest.mark.parametrize("text", ["", "1 +", "import os", "(" * 300, "1" * 501])
def test_invalid_syntax_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read|characters"):
        parse(text)


@pytest.mark.parametrize("text", ["9 ** 9999", "'x' * 10 ** 9", "[1] * 9", "1 / 0", "'a' - 1", "int('x')", "len(3)"])
def test_values_that_do_not_fit(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be computed"):
        parse(text).value(NAMES.__getitem__)


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="names 'aps', which does not exist"):
        parse("aps").value(NAMES.__getitem__)


def test_names_and_calls_are_known_before_anything_is_computed() -> None:
    result = parse("ap - max(f_ra, task('news'))", functions=("task",))
    assert result.names == ("ap", "f_ra") and result.calls == (("task", "news"),)


@given(
    st.recursive(
        st.integers(-9, 9).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        max_leaves=12,
    )
)
def test_arithmetic_is_pythons(text: str) -> None:
    assert parse(text).value(NAMES.__getitem__) == eval(text)
