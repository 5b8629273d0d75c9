"""Who is at work on a run, asked before anything starts it anew or asks it to stop. Standard library only."""

import fcntl
import tomllib
from collections.abc import Callable
from pathlib import Path

from launch import ledger, run_folder, slurm_commands
from pretrain.errors import ConfigError


def holder(run: Path) -> str | None:
    """The job that SLURM has for this run, or the process that holds its lock; None where neither is known."""
    job = ledger.last_job(run)
    if job is not None and slurm_commands.alive(job):
        return f"job {job} ({slurm_commands.state(job)})"
    try:
        with open(run / "lock", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return (run / "lock").read_text(encoding="utf-8") or "another start"
    except OSError:
        return None  # no start yet, or a file system without locks
    return None


def require_free(run: Path, name: str, say: Callable[[str], None]) -> None:
    """Refuse a folder that holds another run, or that has a start of this run alive or waiting; ConfigError.

    The ranks check the same, but they can leave no outcome in a folder that is not theirs. A STOP that nobody is left
    to honour is removed, since a person now wants the run to go on.
    """
    try:
        held = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["run"]["name"]
    except (OSError, *run_folder.BROKEN, KeyError, TypeError):
        held = name
    if held != name:
        raise ConfigError(f"run.dir={str(run)!r} holds the run named {held!r}, not run.name={name!r}; choose another")
    if (who := holder(run)) is not None:
        raise ConfigError(
            f"run.dir={str(run)!r} is in use by {who}; wait for its end, end it with pretrain-launch stop {run} or "
            "scancel, or choose another run.dir"
        )
    if (run / "STOP").exists():
        (run / "STOP").unlink()
        say(f"removed  | {run}/STOP, which no start of this run was left to honour")
