"""Tables of runs: CSV, JSON lines or parquet in, named columns of numbers or text out, rows chosen by an expression.

Made by collect.py or by others. Column names are given, never guessed, and so are units: a `params` column whose
largest value is 70 is refused until someone says that it counts billions. `where` is a small language of comparisons
over columns, read with Python's parser and evaluated here; it can call nothing but the functions listed below.
"""

import ast
import csv
import difflib
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import ConfigError
from pretrain.scaling.forms import Points

Column = NDArray[np.generic]


@dataclass(frozen=True)
class Table:
    path: str
    columns: dict[str, Column]  # float64 where every filled cell is a number (empty cells are nan), else text
    lines: NDArray[np.int64]  # of the file (row numbers for parquet), for messages

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> Column:
        if name not in self.columns:
            near = difflib.get_close_matches(name, self.columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{self.path} has no column {name!r}{hint} It has {', '.join(self.columns)}")
        return self.columns[name]

    def numbers(self, name: str) -> NDArray[np.float64]:
        column = self.column(name)
        if column.dtype.kind != "f":
            bad = [(line, text) for line, text in zip(self.lines, column, strict=True) if _float(str(text)) is None]
            raise ConfigError(
                f"{self.path} line {bad[0][0]}: column {name!r} holds {str(bad[0][1])!r}, which is no number"
            )
        return column.astype(np.float64)

    def take(self, keep: NDArray[np.bool_]) -> "Table":
        return Table(self.path, {name: column[keep] for name, column in self.columns.items()}, self.lines[keep])


def read_table(path: str | Path) -> Table:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such table")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        raw = pq.read_table(path).to_pydict()
        rows = [dict(zip(raw, values, strict=True)) for values in zip(*raw.values(), strict=True)]
        lines = list(range(1, len(rows) + 1))
    elif path.suffix in (".jsonl", ".json"):
        rows, lines = _read_json(path)
    else:
        rows, lines = _read_csv(path)
    if not rows:
        raise ConfigError(f"{path}: the table has no rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    return Table(str(path), columns, np.array(lines, dtype=np.int64))


def write_table(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """CSV, or parquet or JSON lines by the suffix; columns in the order in which rows first name them."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


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
        values = table.numbers(name)
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            where = ", ".join(
                f"line {line} ({value:g})" for line, value in zip(table.lines[bad][:5], values[bad], strict=False)
            )
            raise ConfigError(
                f"{table.path}: column {name!r} ({role}) has {int(bad.sum())} values that are no positive number: "
                f"{where}; mend them, or leave them out, as in --where '{name} > 0'"
            )
        if role in ("params", "tokens") and role not in units and values.max() < 1e4:
            raise ConfigError(
                f"{table.path}: column {name!r} has at most {values.max():g} {role}, which looks like another unit; "
                f"say --{role}-unit 1e6 for millions, 1e9 for billions, or 1 if this is the count"
            )
        columns[role] = values * units.get(role, 1.0)
    return Points(columns["params"], columns["tokens"], columns["loss"], columns.get("unique", columns["tokens"]))


def where(table: Table, expression: str) -> NDArray[np.bool_]:
    """Rows for which the expression holds, such as "loss < 4 and not largest(loss, 5) and kind == 'final'"."""
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"--where {expression!r}: not an expression: {error.msg}") from None
    keep = np.asarray(_evaluate(tree, table, expression))
    if keep.dtype != np.bool_:
        raise ConfigError(f"--where {expression!r} gives numbers, not true or false; compare them with something")
    return np.broadcast_to(keep, len(table)).copy()


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
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*(value(argument) for argument in node.args))
    raise ConfigError(
        f"--where {text!r}: {ast.unparse(node)!r} is not allowed; use columns, numbers, texts, comparisons, "
        f"+ - * / **, and, or, not, and {', '.join(_FUNCTIONS)}"
    )


def _float(text: str) -> float | None:
    try:
        return float(text) if text.strip() else float("nan")
    except ValueError:
        return None


def _column(values: list[Any]) -> Column:
    texts = ["" if value is None else str(value) for value in values]
    numbers = [_float(text) for text in texts]
    if all(number is not None for number in numbers) and any(text.strip() for text in texts):
        return np.array(numbers, dtype=np.float64)
    return np.array(texts)


def _read_csv(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    rows, lines = [], []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                cells = len(reader.fieldnames or [])
                raise ConfigError(f"{path} line {reader.line_num}: the header has {cells} cells, this row has not")
            rows.append({str(name).strip(): cell for name, cell in row.items()})
            lines.append(reader.line_num)
    return rows, lines


def _read_json(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            rows = json.loads(text)
            lines = list(range(1, len(rows) + 1))
        else:
            pairs = [(number, json.loads(line)) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
            rows, lines = [row for _, row in pairs], [number for number, _ in pairs]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: a list of objects is wanted, one a run")
    return rows, lines
