"""Columns of a table in their roles, and a small language over columns: rows chosen, values computed.

`where` takes comparisons, such as "loss < 4 and not largest(loss, 5)"; a role takes a column's name or arithmetic, such
as "flops / (6 * N)" or "log(perplexity)". Both are read with Python's parser and evaluated here, and can call nothing
but the functions listed below. Units are asked for, never guessed.
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import ConfigError
from pretrain.scaling.forms import Points
from pretrain.scaling.table import Table

MOST_NATS = 20.0  # a uniform guess over 500 million tokens; a larger loss is in another unit


def points_of(
    table: Table,
    params: str,
    tokens: str,
    loss: str,
    *,
    unique: str | None = None,
    units: dict[str, float] | None = None,
) -> Points:
    """The columns as Points, each times its unit; cells that are no positive number are refused by line."""
    units = units or {}
    columns: dict[str, NDArray[np.float64]] = {}
    for role, name in (("params", params), ("tokens", tokens), ("loss", loss), ("unique", unique)):
        if name is None:
            continue
        values = numbers(table, name)
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            places = ", ".join(
                f"line {line} ({value:g})" for line, value in zip(table.lines[bad][:5], values[bad], strict=False)
            )
            raise ConfigError(
                f"{table.path}: column {name!r} ({role}) has {int(bad.sum())} values that are no positive number: "
                f"{places}; mend them, or leave them out, as in --where '{name} > 0'"
            )
        if role in ("params", "tokens") and role not in units and values.max() < 1e4:
            raise ConfigError(
                f"{table.path}: column {name!r} has at most {values.max():g} {role}, which looks like another unit; "
                f"say --{role}-unit 1e6 for millions, 1e9 for billions, or 1 if this is the count"
            )
        if role == "loss" and values.max() > MOST_NATS:
            raise ConfigError(
                f"{table.path}: column {name!r} (loss) goes up to {values.max():g}, more than {MOST_NATS:g} nats a "
                f"token; where it is perplexity, say --loss 'log({name})'; else leave such rows out"
            )
        columns[role] = values * units.get(role, 1.0)
    return Points(columns["params"], columns["tokens"], columns["loss"], columns.get("unique", columns["tokens"]))


def numbers(table: Table, text: str) -> NDArray[np.float64]:
    """The column of that name, or what an expression over columns comes to; nan where a cell is empty."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        tree = ast.Name(text)
    if text in table.columns or isinstance(tree, ast.Name):
        return table.numbers(text)
    values = _value(tree, table, text)
    if values.dtype.kind not in "if":
        raise ConfigError(f"{text!r} is no number for each row of {table.path}; name a column, or write arithmetic")
    return np.broadcast_to(values.astype(np.float64), len(table)).copy()


def where(table: Table, expression: str) -> NDArray[np.bool_]:
    """Rows for which the expression holds, such as "loss < 4 and not largest(loss, 5) and kind == 'final'"."""
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"--where {expression!r}: not an expression: {error.msg}") from None
    keep = _value(tree, table, expression)
    if keep.dtype != np.bool_:
        raise ConfigError(f"--where {expression!r} gives numbers, not true or false; compare them with something")
    return np.broadcast_to(keep, len(table)).copy()


def _value(tree: ast.expr, table: Table, text: str) -> NDArray[Any]:
    try:
        return np.asarray(_evaluate(tree, table, text))
    except TypeError:
        texts = sorted(name for name, column in table.columns.items() if column.dtype.kind != "f" and name in text)
        raise ConfigError(
            f"{text!r} mixes numbers with the text in {', '.join(texts)} of {table.path}; use its columns of numbers"
        ) from None


_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def _ranked(values: Any, count: Any, sign: int) -> Any:
    """True for the `count` rows with the largest (sign -1) or smallest values; ties by line."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(sign * np.asarray(values), kind="stable")[: int(count)]] = True
    return chosen


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "log": np.log,
    "log10": np.log10,
    "abs": np.abs,
    "isnan": np.isnan,
    "largest": lambda values, count: _ranked(values, count, -1),
    "smallest": lambda values, count: _ranked(values, count, 1),
}


def _evaluate(node: ast.expr, table: Table, text: str) -> Any:
    def value(child: ast.expr) -> Any:
        return _evaluate(child, table, text)

    with np.errstate(invalid="ignore", divide="ignore"):
        match node:
            case ast.Constant(value=bool() | int() | float() | str()):
                return node.value
            case ast.Name():
                return table.column(node.id)
            case ast.BoolOp():
                join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
                return join.reduce(np.broadcast_arrays(*(value(child) for child in node.values)))
            case ast.UnaryOp(op=ast.Not()):
                return np.logical_not(value(node.operand))
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
            case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
                sides = [value(side) for side in (node.left, *node.comparators)]
                pairs = zip(node.ops, sides, sides[1:], strict=False)
                return np.logical_and.reduce([np.asarray(_COMPARE[type(op)](a, b)) for op, a, b in pairs])
            case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str(name))], keywords=[]):
                return table.column(name)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*(value(argument) for argument in node.args))
    raise ConfigError(
        f"{text!r}: {ast.unparse(node)!r} is not allowed; use columns (col('its name') where that is no plain word), "
        f"numbers, texts, comparisons, + - * / **, and, or, not, and {', '.join(_FUNCTIONS)}"
    )
