"""Expressions in sweep files: `ap - f_ra`, `10 * train.learning_rate`, read as a tree and computed by us alone.

A setting may follow from another one and a metric may combine several, yet a file from elsewhere is never executed:
whatever the language below does not define is an error before anything starts.

The language: numbers, strings, `True`, `False`, `None`, lists, dotted names, `+ - * / // % **`, comparisons, `in`,
`and or not`, `a if b else c`, and the functions of `FUNCTIONS` or of the caller.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raycl.errors import ConfigError

LONGEST, LARGEST_POWER = 500, 100
"""Characters of an expression; exponent (and what it may be raised to is a number)."""

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, group: item in group,
    ast.NotIn: lambda item, group: item not in group,
}
SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "int": int,
    "float": float,
    "len": len,
}
FAILURES = (ArithmeticError, TypeError, ValueError, KeyError)
"""Errors of computing with unsuitable values."""


@dataclass(frozen=True)
class Expression:
    """A parsed expression.

    Attributes:
        names: dotted names that it reads. calls: function name -> arguments written as strings in its calls.
    """

    text: str
    tree: ast.expr
    names: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]

    def value(self, names: Callable[[str], Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> Any:
        """Compute the expression.

        Args:
            names: the value of a dotted name; may raise KeyError.

        Raises:
            ConfigError: a name is unknown, or values do not fit.
        """
        try:
            return _value(self.tree, names, {**FUNCTIONS, **(functions or {})})
        except KeyError as error:
            raise ConfigError(f"expression '{self.text}' names {error}, which does not exist") from error
        except FAILURES as error:
            raise ConfigError(f"expression '{self.text}' cannot be computed: {error}") from error


def parse(text: str, functions: tuple[str, ...] = ()) -> Expression:
    """Read an expression.

    Args:
        functions: names of the caller's functions beside `FUNCTIONS`.

    Raises:
        ConfigError: it is not Python syntax, or uses what the language does not define.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"expression '{text[:40]}...' has {len(text)} characters: expected at most {LONGEST}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"expression '{text}' cannot be read: {error}") from error
    known = {*FUNCTIONS, *functions}
    names = tuple(dict.fromkeys(_names(tree, text, known)))
    calls = tuple(
        (_dotted(node.func), argument.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )
    return Expression(text, tree, names, calls)


def _names(node: ast.expr, text: str, known: set[str]) -> Iterator[str]:
    """Yield dotted names that are read; refuses everything else that is not in the language."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return
        case ast.Name() | ast.Attribute() if _dotted(node):
            yield _dotted(node)
            return
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            parts = [node.left, node.right]
        case ast.UnaryOp(op=sign) if type(sign) in SIGNS:
            parts = [node.operand]
        case ast.BoolOp():
            parts = node.values
        case ast.Compare(ops=ops) if all(type(operator) in COMPARISONS for operator in ops):
            parts = [node.left, *node.comparators]
        case ast.IfExp():
            parts = [node.test, node.body, node.orelse]
        case ast.List() | ast.Tuple():
            parts = node.elts
        case ast.Call(keywords=[]) if _dotted(node.func) in known:
            parts = node.args
        case _:
            raise ConfigError(
                f"expression '{text}' holds '{ast.unparse(node)}', which is not allowed: expected numbers, strings, "
                f"names, arithmetic, comparisons, 'a if b else c' and {', '.join(sorted(known))}"
            )
    for part in parts:
        yield from _names(part, text, known)


def _dotted(node: ast.expr) -> str:
    """Return `train.learning_rate` for a chain of attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and _dotted(node.value):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _value(node: ast.expr, names: Callable[[str], Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    def of(part: ast.expr) -> Any:
        return _value(part, names, functions)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            return names(_dotted(node))
        case ast.BinOp():
            return _computed(node.op, of(node.left), of(node.right))
        case ast.UnaryOp():
            return SIGNS[type(node.op)](of(node.operand))
        case ast.BoolOp():
            result = of(node.values[0])
            for part in node.values[1:]:
                if bool(result) is isinstance(node.op, ast.Or):
                    return result
                result = of(part)
            return result
        case ast.Compare():
            sides = [of(part) for part in [node.left, *node.comparators]]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            return all(COMPARISONS[type(operator)](left, right) for operator, left, right in pairs)
        case ast.IfExp():
            return of(node.body) if of(node.test) else of(node.orelse)
        case ast.List() | ast.Tuple():
            return [of(part) for part in node.elts]
        case ast.Call():
            return functions[_dotted(node.func)](*[of(part) for part in node.args])
    raise AssertionError(f"'{ast.unparse(node)}' was let through by `_names`")


def _computed(sign: ast.operator, left: Any, right: Any) -> Any:
    """Compute arithmetic over numbers; what could grow without end is refused, and `+` alone also joins texts and
    lists."""
    numbers = all(isinstance(side, int | float) for side in (left, right))
    if not numbers and not isinstance(sign, ast.Add):
        raise ValueError(f"{left!r} and {right!r} are not both numbers")
    if isinstance(sign, ast.Pow) and (abs(right) > LARGEST_POWER or abs(left) > 1e6):
        raise ValueError(f"{left!r} to the power of {right!r} is too large")
    return ARITHMETIC[type(sign)](left, right)
