"""Submitting tiny runs to the lab and watching what becomes of them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from launch import ledger, run_folder
from tests.launch.tiny_run import ROOT, write_config
from tests.slurm.lab import Lab

STEPS = 40  # of a run that is to finish
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 240, run: Path | None = None) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} in {seconds} s\n{output(run) if run is not None else ''}"
        time.sleep(0.1)


def output(run: Path) -> str:
    """All that the run's jobs have said."""
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted((run / "logs").glob("slurm-*.out")))


def write_cluster(path: Path, **tables: dict[str, str]) -> Path:
    """A cluster file for the lab; values are TOML."""
    cluster: dict[str, dict[str, str]] = {
        "slurm": {"time": '"01:00:00"', "signal_seconds": "60"},
        "node": {"gpus": "0", "ranks": "2", "cpus": "2", "memory": '""', "exclusive": "false"},
        "software": {"python": f'"{sys.executable}"'},
        "environment": {"OMP_NUM_THREADS": '"1"'},
        "health": {"enabled": "false"},
    }
    for table, keys in tables.items():
        cluster.setdefault(table, {}).update(keys)
    lines = ['name = "lab"']
    for table, keys in cluster.items():
        lines += [f"[{table}]", *(f"{key} = {value}" for key, value in keys.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


class Job(NamedTuple):
    lab: Lab
    run: Path
    id: str

    def steps(self) -> int:
        records = run_folder.records(self.run / "metrics.jsonl")
        return int(records[-1]["step"]) if records else 0

    def newest(self) -> str:
        return ledger.last_job(self.run) or self.id

    def wait_for_step(self, step: int, seconds: float = 240) -> None:
        wait_for(lambda: self.steps() >= step, f"step {step}", seconds, self.run)

    def wait_for_text(self, pattern: str, seconds: float = 240) -> None:
        wait_for(lambda: re.search(pattern, output(self.run)), pattern, seconds, self.run)

    def wait_for_end(self, seconds: float = 300) -> str:
        """Until neither this job nor one that replaced it is alive; the last one's state."""
        wait_for(lambda: self.lab.state(self.newest()) in _ENDED, "end of the job", seconds, self.run)
        return self.lab.state(self.newest())

    def outcome(self) -> dict[str, Any] | None:
        return run_folder.read_outcome(self.run)

    def ends(self) -> list[dict[str, Any]]:
        return [record for record in ledger.read(self.run) if record["event"] == "end"]

    def events(self) -> list[str]:
        return [record["event"] for record in run_folder.records(self.run / "events.jsonl")]


def launch(lab: Lab, *args: str | Path, status: int = 0) -> str:
    """`pretrain-launch` against the lab; what it printed."""
    command = [sys.executable, "-m", "launch", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def submit(
    lab: Lab,
    folder: Path,
    data: Path,
    name: str,
    *,
    nodes: int = 2,
    steps: int = STEPS,
    launcher: str = "torchrun",
    cluster: dict[str, dict[str, str]] | None = None,
    **config: dict[str, Any],
) -> Job:
    """A run of `steps` steps on nodes x 2 ranks."""
    toml = write_config(folder / f"{name}.toml", folder / name, data, steps=steps, rows=32, **config)
    site = write_cluster(folder / f"{name}.cluster.toml", **(cluster or {}))
    said = launch(lab, "slurm", toml, "--nodes", str(nodes), "--cluster", site, "--launcher", launcher)
    match = re.search(r"job +\| (\d+)", said)
    assert match, said
    return Job(lab, folder / name, match[1])


def weights(run: Path, step: int) -> dict[str, bytes]:
    """Every file of tensors of a checkpoint."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    found = {path.name: path.read_bytes() for path in sorted(folder.glob("rank-*.safetensors"))}
    assert len(found) == 4, f"{folder} has not the tensors of 4 ranks: {list(found)}"
    return found


def environment_of(pid: int) -> dict[str, str]:
    items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in (item.partition(b"=") for item in items)}
