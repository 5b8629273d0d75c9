"""A run's own folder: resolved config, environment, outcome and attempt number; the check that all ranks see it."""

import datetime
import errno
import fcntl
import json
import logging
import os
import platform
import secrets
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pretrain.config import Config
from pretrain.config_file import dump_config
from pretrain.dist import World, all_ranks_ok, broadcast_object, host
from pretrain.errors import ConfigError
from pretrain.metrics.jsonl import read_records
from pretrain.train.checkpoint_folder import replace_synced
from pretrain.untrusted import read_json, read_toml

Status = Literal["finished", "refused", "anomaly", "preempted", "time_limit", "user"]
EXIT_STATUS: dict[str, int] = {
    "finished": 0,
    "refused": 2,
    "anomaly": 70,
    "preempted": 75,
    "time_limit": 75,
    "user": 75,
}
"""Reason of a decided end -> exit status of a lone process; 75 says: saved, start me again."""


def open_run_folder(cfg: Config, world: World) -> int:
    """Make the folder, refuse another run's, check that every rank sees it; the attempt number (0, then one more)."""
    run = Path(cfg.run.dir)
    error: Exception | None = None
    token, attempt = secrets.token_hex(8), 0
    if world.first:
        try:
            (run / "checkpoints").mkdir(parents=True, exist_ok=True)
            (run / "logs").mkdir(exist_ok=True)
            _refuse_another_run(cfg, run)
            attempt = next_attempt(run)
            replace_synced(run / "seen", token)
        except (OSError, ConfigError) as e:
            error = e if isinstance(e, ConfigError) else ConfigError(f"run.dir={cfg.run.dir!r} cannot be used: {e}")
    all_ranks_ok(error, world)
    token, attempt = broadcast_object((token, attempt), world)
    try:
        seen = (run / "seen").read_text()
    except OSError as e:
        seen = f"nothing ({e.strerror})"
    if seen != token:
        error = ConfigError(
            f"run.dir={cfg.run.dir!r} is not the same folder on rank {world.rank} ({host()}): rank 0 wrote {token}, "
            f"here is {seen}; put run.dir on a file system that all nodes share"
        )
    all_ranks_ok(error, world)
    if world.first:
        try:
            (run / "seen").unlink()
            (run / "outcome.json").unlink(missing_ok=True)
        except OSError as e:
            error = ConfigError(f"run.dir={cfg.run.dir!r} cannot be used: {e}")
    all_ranks_ok(error, world)
    return attempt


def record_start(cfg: Config, world: World) -> None:
    """Write the resolved config and the environment of an attempt that nothing has refused."""
    write_config(cfg)
    replace_synced(Path(cfg.run.dir) / "environment.json", json.dumps(environment(cfg, world), indent=1) + "\n")


def write_config(cfg: Config) -> None:
    replace_synced(Path(cfg.run.dir) / "config.toml", dump_config(cfg))


@contextmanager
def only_start(run: Path, world: World) -> Iterator[None]:
    """Refuse to start while another start of the same run is alive, anywhere that shares the file system's locks.

    The lock is rank 0's and goes with its process, however that ends.
    """
    error: ConfigError | None = None
    with ExitStack() as held:
        if world.first:
            try:
                run.mkdir(parents=True, exist_ok=True)
                held.enter_context(_locked(run))
            except ConfigError as e:
                error = e
            except OSError as e:
                error = ConfigError(f"run.dir={str(run)!r} cannot be used: {e}")
        all_ranks_ok(error, world)
        yield


def record_refusal(cfg: Config, message: str, *, first: bool) -> bool:
    """Write the outcome of a start that was refused before its ranks met; whether there is one, as far as a rank knows.

    Only rank 0 (`first`) writes, and only where this run's folder exists and no start of it is alive.
    """
    run = Path(cfg.run.dir)
    try:
        _refuse_another_run(cfg, run)
        if first and run.is_dir():
            with _locked(run):
                write_outcome(run, "refused", 0, next_attempt(run), message)
    except (ConfigError, OSError):
        return False
    return run.is_dir()


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Unbuffered: what a full disk refuses would come up again when the file is closed, over the refusal."""
    _refuse_links(run)
    with open(run / "lock", "a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {host()}".encode())
        except BlockingIOError:
            lock.seek(0)
            who = lock.read().decode(errors="replace") or "another start of this run"
            raise ConfigError(
                f"run.dir={str(run)!r} is in use by {who}; "
                f"wait for its end, stop it with touch {run / 'STOP'}, or choose another run.dir"
            ) from None
        except OSError as e:
            if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
                raise
        yield


@contextmanager
def rank_log(run: Path, ranks: World) -> Iterator[None]:
    """Append this rank's warnings and, when it fails, its traceback to RUN/logs/rank-N.log."""
    handler = logging.FileHandler(run / "logs" / f"rank-{ranks.rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    except BaseException:
        logging.getLogger("pretrain").error("rank %d failed\n%s", ranks.rank, traceback.format_exc())
        raise
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        with suppress(OSError):  # of a full disk, over the error that it has caused
            handler.close()


def next_attempt(run: Path) -> int:
    """One more than the last start that events.jsonl knows of."""
    events = run / "events.jsonl"
    starts = [event for event in read_records(events) if event.get("event") == "start"] if events.exists() else []
    return max((event["attempt"] for event in starts if type(event.get("attempt")) is int), default=-1) + 1


def write_outcome(run: Path, reason: Status, step: int, attempt: int, message: str = "") -> None:
    """How this attempt ended, for launchers and people."""
    outcome: dict[str, Any] = {
        "status": EXIT_STATUS[reason],
        "reason": reason,
        "step": step,
        "attempt": attempt,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if message:
        outcome["message"] = message
    replace_synced(run / "outcome.json", json.dumps(outcome) + "\n")


def read_outcome(run: Path) -> dict[str, Any] | None:
    """RUN/outcome.json, or None where the last attempt crashed or none has ended."""
    try:
        outcome = read_json(run / "outcome.json")
    except (OSError, ValueError):
        return None
    return outcome if isinstance(outcome, dict) else None


def environment(cfg: Config, world: World) -> dict[str, Any]:
    """What this start ran on: versions, host, code revision, seed."""
    packages = ("torch", "deepspeed", "numpy", "datasets", "wandb", "sentencepiece", "tokenizers", "tiktoken")
    versions: dict[str, str | None] = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": versions,
        "host": host(),
        "platform": platform.platform(),
        "device": str(world.device),
        "world_size": world.size,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "slurm": {
            k: v for k, v in os.environ.items() if k in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")
        },
        "git": git_revision(),
        "seed": cfg.run.seed,
    }


def git_revision() -> dict[str, Any] | None:
    """Revision of the code that runs, and whether it was changed since; None outside a repository."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"revision": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _refuse_links(run: Path) -> None:
    """A run empties and appends to files by name; whoever made the folder must not choose files elsewhere for that."""
    for folder in (run, run / "logs"):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_symlink() and not path.is_dir():
                raise ConfigError(f"{path} is a link to a file; a run writes files of its own, so move the file here")


def _refuse_another_run(cfg: Config, run: Path) -> None:
    try:
        name = read_toml(run / "config.toml")["run"]["name"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{run / 'config.toml'} cannot be read ({e}); choose another run.dir") from None
    if name != cfg.run.name:
        raise ConfigError(
            f"run.dir={cfg.run.dir!r} holds the run named {name!r}, not run.name={cfg.run.name!r}; "
            f"choose another run.dir"
        )
