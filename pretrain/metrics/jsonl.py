"""Append-only files of one JSON object a line, whole lines only, and numbers that every parser reads.

A line is one write to a file opened for appending, so that a reader never meets half of one and ranks that
share a file do not mix theirs. A line that a crash cut short stays alone on its line.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from pretrain.untrusted import parse_json

_LONGEST_LINE = 1 << 24  # characters


def encode(record: dict[str, Any]) -> str:
    """One line of strict JSON: NaN and infinities, which JSON has no word for, become null."""
    return json.dumps(_plain(record), allow_nan=False, ensure_ascii=False)


class JsonLines:
    """Appends records to `path`; the kernel has a line before `write` returns, or OSError says why not."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o644)
        self._torn = not _ends_with_newline(self._file)

    def write(self, record: dict[str, Any]) -> None:
        line = (b"\n" if self._torn else b"") + encode(record).encode() + b"\n"
        self._torn = True
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes could be written")
        self._torn = False

    def close(self) -> None:
        os.close(self._file)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every whole record of a file, in order; a line cut short by a crash, or none of ours, is passed over."""
    records = []
    with open(path, encoding="utf-8", errors="replace") as f:
        while line := f.readline(_LONGEST_LINE):
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                records.append(record)
    return records


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "item"):  # a numpy scalar or a tensor of one element
        return _plain(value.item())
    return str(value)
