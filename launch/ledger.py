"""What has become of a run's jobs: RUN/jobs/ledger.jsonl, one line for each submission and each end of a start.

Standard library only: the batch script's `verdict` writes it, `slurm` and `status` read it.

    {"event": "submit", "time", "job", "folder", "exclude", "after"}     after: the job that this one replaces, or null
    {"event": "end", "time", "job", "restart", "reason", "step", "nodes", "decision", "why", …}   nodes: {blamed: why}
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from launch import run_folder


def path_of(run: Path) -> Path:
    return run / "jobs" / "ledger.jsonl"


def read(run: Path) -> list[dict[str, Any]]:
    return run_folder.records(path_of(run))


def add(run: Path, event: str, **details: Any) -> None:
    path = path_of(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"event": event, "time": round(time.time(), 3), **details}) + "\n"
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


def jobs(run: Path) -> list[str]:
    """SLURM's ids of all jobs of this run, oldest first."""
    return [record["job"] for record in read(run) if record.get("event") == "submit"]


def last_job(run: Path) -> str | None:
    return next(reversed(jobs(run)), None)


def newest_checkpoint(run: Path) -> int:
    """Step of the newest whole checkpoint; -1 where there is none."""
    steps = [int(marker.parent.name[5:]) for marker in (run / "checkpoints").glob("step-*/COMPLETE")]
    return max(steps, default=-1)


def ends_since_submission(run: Path) -> list[dict[str, Any]]:
    """How the starts went since a person last submitted the run, leaving out those that SLURM itself ended."""
    ends: list[dict[str, Any]] = []
    for record in read(run):
        if record.get("event") == "submit" and not record.get("after"):
            ends = []
        elif record.get("event") == "end" and not record.get("ended_by_slurm"):
            ends.append(record)
    return ends


def excluded(run: Path) -> list[str]:
    """Nodes that the newest job was told not to use."""
    lists = [record.get("exclude", []) for record in read(run) if record.get("event") == "submit"]
    return list(lists[-1]) if lists else []
