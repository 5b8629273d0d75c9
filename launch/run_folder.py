"""Reading a run's folder from outside, without torch: how it ended, how far it is, what went wrong first.

`pretrain train` writes the files; this reads them. No dependencies, so that a batch script's bare python can.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

REFUSAL = "PRETRAIN_REFUSAL"
"""Names the file in which `pretrain` leaves the words of a refusal: torchrun hides its status, and where the run's
folder is not its own there is no outcome."""

BROKEN = (ValueError, RecursionError)
"""What parsing a damaged file raises; RecursionError where brackets stand in brackets without end."""


class Stamp(NamedTuple):
    """Tells one outcome.json from the next that replaces it."""

    inode: int
    modified_ns: int


def stamp(run: Path) -> Stamp | None:
    try:
        found = os.stat(run / "outcome.json")
    except OSError:
        return None
    return Stamp(found.st_ino, found.st_mtime_ns)


def stamp_text(run: Path) -> str:
    """The stamp as one word, for a batch script to keep over a training."""
    found = stamp(run)
    return "none" if found is None else f"{found.inode}:{found.modified_ns}"


def outcome_since(run: Path, before: Stamp | None) -> dict[str, Any] | None:
    """The decided end written since `before` was taken; None after a crash, which writes none."""
    if stamp(run) == before:
        return None
    return read_outcome(run)


def read_outcome(run: Path) -> dict[str, Any] | None:
    try:
        outcome = json.loads((run / "outcome.json").read_text(encoding="utf-8"))
    except (OSError, *BROKEN):
        return None
    return outcome if isinstance(outcome, dict) and isinstance(outcome.get("status"), int) else None


def records(path: Path) -> list[dict[str, Any]]:
    """The whole objects of a file of JSON lines; a missing file has none, a line that a crash cut is passed over."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            record = json.loads(line)
        except BROKEN:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def refusal(note: Path) -> str | None:
    """What a rank has left there."""
    try:
        return note.read_text(encoding="utf-8").strip()
    except OSError:
        return None


class Failure(NamedTuple):
    """A rank's traceback in its log."""

    time: str  # local, to the millisecond; sorts as text
    rank: int
    text: str


_FAILED = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ERROR pretrain: rank (\d+) failed$")
_ENTRY = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ")


def log_sizes(run: Path) -> dict[str, int]:
    """How long each rank's log is now, so that a later look sees only what is new."""
    return {path.name: path.stat().st_size for path in (run / "logs").glob("rank-*.log")}


def first_failure(run: Path, before: dict[str, int], *, since: float = 0.0) -> Failure | None:
    """The earliest traceback that any rank has logged since the logs were of the sizes `before`, and since the clock
    said `since`: the others' usually follow from it."""
    failures = []
    earliest = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    for path in (run / "logs").glob("rank-*.log"):
        with open(path, encoding="utf-8", errors="replace") as f:
            f.seek(before.get(path.name, 0))
            failures += [failure for failure in _failures(f.read().splitlines()) if failure.time >= earliest]
    return min(failures, default=None)


def _failures(lines: list[str]) -> list[Failure]:
    found: list[Failure] = []
    entry: list[str] | None = None
    for line in lines:
        if match := _FAILED.match(line):
            entry = []
            found.append(Failure(match[1], int(match[2]), ""))
        elif _ENTRY.match(line):
            entry = None
        elif entry is not None:
            entry.append(line)
            found[-1] = found[-1]._replace(text="\n".join(entry))
    return found
