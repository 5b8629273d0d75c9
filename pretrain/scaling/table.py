"""Tables of runs: CSV, JSON lines or parquet in, named columns of numbers or text out, rows chosen by an expression.

Made by collect.py or by others. Column names are given, never guessed, and so are units: a `params` column whose
largest value is 70 is refused until someone says that it counts billions. Where a column is named, an expression over
columns may stand instead (expression.py).
"""

import csv
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import ConfigError

Column = NDArray[np.generic]
_NO_VALUE = ("", "-", "na", "n/a", "nan", "null", "none")


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
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"{self.path} has no column {name!r}{hint} It has {', '.join(self.columns)}")
        return self.columns[name]

    def numbers(self, name: str) -> NDArray[np.float64]:
        column = self.column(name)
        if column.dtype.kind != "f":
            bad = [(line, text) for line, text in zip(self.lines, column, strict=True) if _float(str(text)) is None]
            raise ConfigError(
                f"{self.path} line {bad[0][0]}: column {name!r} holds {str(bad[0][1])!r}, which is no number; write "
                f"numbers as 7e9, and leave cells without one empty"
            )
        return column.astype(np.float64)

    def take(self, keep: NDArray[np.bool_]) -> "Table":
        return Table(self.path, {name: column[keep] for name, column in self.columns.items()}, self.lines[keep])


def read_table(path: str | Path) -> Table:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such table")
    read = {".parquet": _read_parquet, ".jsonl": _read_json, ".json": _read_json}.get(path.suffix, _read_csv)
    try:
        rows, lines = read(path)
    except ValueError as error:  # of bytes that are no text, JSON or parquet
        raise ConfigError(f"{path}: cannot be read as a table: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: the table has no rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    return Table(str(path), columns, np.array(lines, dtype=np.int64))


def write_table(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """CSV, or parquet or JSON lines by the suffix; columns in the order in which rows first name them."""
    path = Path(path)
    if path.suffix not in (".csv", ".jsonl", ".parquet"):
        raise ConfigError(f"--out {path}: tables are written as .csv, .jsonl or .parquet; choose one by the suffix")
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


def _float(text: str) -> float | None:
    """The number of a cell, nan where it has none; None for any other text."""
    if text.strip().lower() in _NO_VALUE:
        return float("nan")
    try:
        return float(text)
    except ValueError:
        return None


def _column(values: list[Any]) -> Column:
    texts = ["" if value is None else str(value) for value in values]
    numbers = [_float(text) for text in texts]
    if all(number is not None for number in numbers) and not np.all(np.isnan(np.array(numbers, dtype=np.float64))):
        return np.array(numbers, dtype=np.float64)
    return np.array(texts)


def _read_csv(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    rows, lines = [], []
    with path.open(newline="", encoding="utf-8-sig") as file:
        header = file.readline()
        file.seek(0)
        reader = csv.DictReader(file, delimiter=max(",;\t", key=header.count))
        names = [name.strip() for name in reader.fieldnames or []]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"{path}: two columns are named {sorted(twice)[0]!r}; rename one")
        for row in reader:
            if None in row or None in row.values():
                cells = len(reader.fieldnames or [])
                raise ConfigError(f"{path} line {reader.line_num}: the header has {cells} cells, this row has not")
            rows.append({str(name).strip(): cell for name, cell in row.items()})
            lines.append(reader.line_num)
    return rows, lines


def _read_parquet(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    return rows, list(range(1, len(rows) + 1))


def _read_json(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        rows = json.loads(text)
        lines = list(range(1, len(rows) + 1))
    else:
        pairs = [(number, json.loads(line)) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        rows, lines = [row for _, row in pairs], [number for number, _ in pairs]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: a list of objects is wanted, one a run")
    return rows, lines
