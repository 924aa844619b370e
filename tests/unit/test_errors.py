"""The exception tree is what its docstring draws."""

from __future__ import annotations

import re

import pytest

from raycl import errors

DRAWN = re.findall(r"^(.*?)(\w+Error)\b", str(errors.__doc__), flags=re.MULTILINE)
CLASSES = {name: value for name, value in vars(errors).items() if isinstance(value, type)}


def test_every_class_is_drawn_once_and_nothing_else_is() -> None:
    assert sorted(name for _, name in DRAWN) == sorted(CLASSES)


def test_parents_are_as_drawn() -> None:
    above: list[tuple[int, str]] = []
    for indent, name in DRAWN:
        while above and above[-1][0] >= len(indent):
            above.pop()
        parent = CLASSES[above[-1][1]] if above else Exception
        assert CLASSES[name].__base__ is parent, f"{name} is drawn below {parent.__name__}"
        above.append((len(indent), name))


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())
def test_one_except_catches_all_and_the_text_is_the_message(kind: type[Exception]) -> None:
    with pytest.raises(errors.RayclError, match=r"^rank is 0$"):
        raise kind("rank is 0")


def test_one_item_is_singular() -> None:
    assert errors.counted(1, "problem") == "1 problem"
    assert [errors.counted(number, "file of tensors") for number in (0, 2, 1000)] == [
        *("0 files of tensors", "2 files of tensors", "1,000 files of tensors")
    ]
    assert errors.counted(0.5, "CPU") == "0.5 CPUs" and errors.counted(1.0, "CPU") == "1 CPU"


def test_every_class_documents_when_it_is_raised() -> None:
    silent = [name for name, kind in CLASSES.items() if not kind.__doc__]
    assert not silent, f"no docstring: {silent}"
