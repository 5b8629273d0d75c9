"""Files that anyone may have made: JSON and TOML, read only where one of ours could be like that.

What is wrong is an OSError or a ValueError; callers name the file. Neither a device, a pipe or a sparse terabyte, nor
brackets in brackets keep a program busy, fill its memory or end it with a trace.
"""

import json
import stat
import tomllib
from pathlib import Path
from typing import Any

_LARGEST = 1 << 26  # bytes
_DEEPEST = 32  # tables in tables


def read_text(path: Path, most: int = _LARGEST) -> str:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    if status.st_size > most:
        raise ValueError(f"it has {status.st_size:,} bytes, and {most:,} are allowed")
    return path.read_text(encoding="utf-8")


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, most: int = _LARGEST) -> Any:
    return parse_json(read_text(path, most))


def read_toml(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        tables = None
    if tables is None or _depth_exceeds(tables, _DEEPEST):
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    return tables


def _depth_exceeds(tables: dict[str, Any], most: int) -> bool:
    level: list[Any] = [tables]
    for _ in range(most):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True
