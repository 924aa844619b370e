"""Expressions in sweep files: `ap - f_ra`, `10 * train.learning_rate`, computed by simpleeval.

A setting may follow from another one and a metric may combine several, yet a file from elsewhere is never executed:
whatever the language below does not define is an error before anything starts.

The language: numbers, strings, `True`, `False`, `None`, lists, dotted names, `+ - * / // % **`, comparisons, `in`, `and
or not`, `a if b else c`, and the functions of `FUNCTIONS` or of the caller. A trial's metrics are such expressions: of
AP, F.Ra or a task's score, after each task.
"""

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simpleeval import DEFAULT_OPERATORS, EvalWithCompoundTypes, InvalidExpression

from raycl.errors import ConfigError
from raycl.metrics.matrix import AccuracyMatrix, summary

LONGEST, LARGEST_POWER = 500, 100
"""Characters of an expression; exponent (and what it may be raised to is a number)."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (min, max, abs, round, int, float, len)
}


def _of_numbers(kind: type[ast.operator]) -> Callable[[Any, Any], Any]:
    """Return arithmetic over numbers alone; texts and lists could grow without end, and so could powers."""

    def computed(left: Any, right: Any) -> Any:
        if not all(isinstance(side, int | float) for side in (left, right)):
            raise ValueError(f"{left!r} and {right!r} are not both numbers")
        if kind is ast.Pow and (abs(right) > LARGEST_POWER or abs(left) > 1e6):
            raise ValueError(f"{left!r} to the power of {right!r} is too large")
        return DEFAULT_OPERATORS[kind](left, right)

    return computed


COMPARED = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{kind: DEFAULT_OPERATORS[kind] for kind in (*COMPARED, ast.Add, ast.USub, ast.UAdd, ast.Not)},
    **{kind: _of_numbers(kind) for kind in (ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)},
}


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
        known = {**FUNCTIONS, **(functions or {})}
        try:
            evaluator = EvalWithCompoundTypes(OPERATORS, known, lambda node: names(node.id))
            return evaluator.eval(self.text, self.tree)
        except KeyError as error:
            raise ConfigError(f"expression '{self.text}' names {error}, which does not exist") from error
        except (InvalidExpression, ArithmeticError, TypeError, ValueError) as error:
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
        tree = _DottedNames().visit(ast.parse(text.strip(), mode="eval")).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"expression '{text}' cannot be read: {error}") from error
    known = {*FUNCTIONS, *functions}
    parts = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    for node in parts:
        if not _is_allowed(node, known):
            raise ConfigError(
                f"expression '{text}' holds '{ast.unparse(node)}', which is not allowed: expected numbers, strings, "
                f"names, arithmetic, comparisons, 'a if b else c' and {', '.join(sorted(known))}"
            )
    calls = [node for node in parts if isinstance(node, ast.Call)]
    called = [node.func for node in calls]
    names = [node.id for node in parts if isinstance(node, ast.Name) and node not in called]
    texts = [
        (ast.unparse(node.func), argument.value)
        for node in calls
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return Expression(text, tree, tuple(dict.fromkeys(names)), tuple(texts))


class _DottedNames(ast.NodeTransformer):
    """Makes `train.learning_rate` one name."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        name = ast.unparse(node)
        return ast.Name(name, node.ctx) if all(map(str.isidentifier, name.split("."))) else node


def _is_allowed(node: ast.expr, functions: set[str]) -> bool:
    """Return whether the language has such a part; the parts inside it are checked by themselves."""
    match node:
        case ast.Constant(value=value):
            return value is None or isinstance(value, bool | int | float | str)
        case ast.BinOp(op=sign) | ast.UnaryOp(op=sign):
            return type(sign) in OPERATORS
        case ast.Compare(ops=signs):
            return all(type(sign) in OPERATORS for sign in signs)
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in functions
    return isinstance(node, ast.Name | ast.BoolOp | ast.IfExp | ast.List | ast.Tuple)


NAMES = ("ap", "f_ra", "fwt", "bwt", "bwt_m", "average_accuracy")
"""The numbers of a run that a metric may name; formulas in `raycl.metrics.matrix`."""

FORGETTING = ("f_ra", "bwt", "bwt_m")
"""Numbers that are 0 after the first task, when nothing can be forgotten."""


def read_metric(text: str) -> Expression:
    """Parse a metric such as `ap`, `ap - 0.5 * f_ra` or `task("agnews")`.

    Raises:
        ConfigError: it is not an expression, or names what is no number of a run.
    """
    expression = parse(text, functions=("task",))
    unknown = [name for name in expression.names if name not in NAMES]
    if unknown:
        raise ConfigError(f"metric '{text}' names '{unknown[0]}': expected {', '.join(NAMES)} or task(\"its name\")")
    return expression


def measured(
    metrics: Sequence[Expression],
    tasks: Sequence[str],
    phases: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    singles: Mapping[str, float] | None = None,
) -> list[float | None]:
    """Return each metric after the phases of `records` (at least one).

    None where a number that it names is undefined, and where it has no value for these numbers (`ap / f_ra` where
    nothing is forgotten).
    """
    matrix = AccuracyMatrix.of_records(tasks, phases, records)
    if len(tasks) == len(phases):
        matrix = matrix.upto(len(records))
    numbers: dict[str, Any] = dict(summary(matrix, singles))
    if len(records) == 1:
        numbers |= {name: 0.0 for name in FORGETTING if numbers[name] is None}
    scores = {task: cell["value"] for task, cell in records[-1]["row"].items() if task in matrix.tasks}
    values: list[float | None] = []
    for metric in metrics:
        undefined = any(numbers[name] is None for name in metric.names)
        unseen = any(name == "task" and task not in scores for name, task in metric.calls)
        values.append(None if undefined or unseen else _value(metric, numbers, scores))
    return values


def _value(metric: Expression, numbers: Mapping[str, Any], scores: Mapping[str, float]) -> float | None:
    try:
        value = float(metric.value(numbers.__getitem__, {"task": scores.__getitem__}))
    except (ConfigError, TypeError, ValueError):  # another trial's numbers may have one
        return None
    return value if math.isfinite(value) else None
