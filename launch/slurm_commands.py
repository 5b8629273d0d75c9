"""The SLURM commands that a launcher needs, each one call. Standard library only."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUE")


class SlurmError(Exception):
    """A SLURM command that is missing or refused; the message has what it said."""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of the job that we may be in, which sbatch would hand on to the next."""
    of_a_job = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "PRETRAIN_AFTER")
    return {k: v for k, v in environment.items() if k == "SLURM_CONF" or not k.startswith(of_a_job)}


def submit(script: Path, *, chdir: Path, options: Sequence[str] = (), after: str | None = None) -> str:
    """SLURM's id of the new job; `after`: the job that it replaces, which it sees as PRETRAIN_AFTER."""
    environment = clean_environment(os.environ) | ({"PRETRAIN_AFTER": after} if after is not None else {})
    said = _call(["sbatch", "--parsable", f"--chdir={chdir}", *options, str(script)], environment)
    job = said.strip().split(";")[0]
    if not re.fullmatch(r"\d+", job):
        raise SlurmError(f"sbatch answered {said!r}, which has no job id")
    return job


def requeue(job: str) -> None:
    _call(["scontrol", "requeue", job])


def state(job: str) -> str | None:
    """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED …; None where SLURM has forgotten the job.

    The states of an array's tasks joined by commas."""
    try:
        said = _call(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"])
    except SlurmError:
        return None
    return ",".join(sorted(set(said.split()))) or None


def alive(job: str) -> bool:
    """Whether SLURM has this job, or will start it again."""
    found = state(job)
    return found is not None and any(word in found for word in _LIVE)


def running(jobs: Sequence[str]) -> list[str]:
    """Those of these jobs that have nodes now."""
    if not jobs:
        return []
    try:
        said = _call(["squeue", "--noheader", "--states=RUNNING,SUSPENDED", f"--jobs={','.join(jobs)}", "--format=%i"])
    except SlurmError:
        return []
    return said.split()


def reason(job: str) -> str | None:
    """Why a job waits, in SLURM's word: Resources, Priority, BeginTime, ReqNodeNotAvail …; None where it does not."""
    try:
        said = _call(["squeue", "--noheader", "--states=PENDING", f"--jobs={job}", "--format=%r"])
    except SlurmError:
        return None
    return ",".join(sorted(set(said.splitlines()))) or None


def _call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on this machine's PATH; run this where SLURM's commands are") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} has not answered for two minutes") from None
    if done.returncode != 0:
        raise SlurmError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
