"""`pretrain-launch local`: torchrun on this machine.

Refuses a config or layout that cannot work before anything starts, hands TERM, INT and USR1 to the ranks, and turns
the run's own outcome into the exit status: 0 finished, 2 refused, 70 anomaly, 75 saved and to be started again,
1 a crash.
"""

import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from launch import free, ranks, run_folder, torchrun
from pretrain.config_file import load_config
from pretrain.errors import ConfigError


def launch(
    config: Path,
    overrides: Sequence[str],
    *,
    nproc: int,
    max_restarts: int = 0,
    port: int | None = None,
    train_options: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> int:
    """Train on `nproc` ranks; ConfigError before anything has started, else the exit status.

    `train_options` go to pretrain train as they are.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: at least one rank is needed")
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: give 0 or more")
    cfg = load_config(config, overrides)
    cfg.layout(nproc)
    run = Path(cfg.run.dir)
    free.require_free(run, cfg.run.name, say)
    if port is not None:
        require_free_port(port)
    count, why = torchrun.threads(os.environ, nproc, torchrun.allowed_cores())
    say(why)
    line = torchrun.command(
        ["pretrain", "train", str(config), *overrides, *train_options],
        nproc=nproc,
        endpoint=f"127.0.0.1:{port or 0}",
        rendezvous_id=f"local-{secrets.token_hex(4)}",
        log_dir=run / "logs" / "local",
        max_restarts=max_restarts,
        local_address="127.0.0.1",
    )
    before, logged = run_folder.stamp(run), run_folder.log_sizes(run)
    with tempfile.TemporaryDirectory() as aside:
        note = Path(aside) / "refused"
        environment = os.environ | {"OMP_NUM_THREADS": str(count), run_folder.REFUSAL: str(note)}
        status = ranks.supervise(line, environment, ranks.torchrun_ranks, say)
        refused = run_folder.refusal(note)
    outcome = run_folder.outcome_since(run, before)
    if outcome is not None:
        return int(outcome["status"])
    if refused is not None:
        raise ConfigError(refused)
    say(f"crashed: torchrun ended with {status} and the run has decided nothing; logs are under {run / 'logs'}")
    failure = run_folder.first_failure(run, logged)
    if failure is not None:
        say(f"first error, at {failure.time} on rank {failure.rank}:\n{failure.text}")
    return 1


def require_free_port(port: int) -> None:
    """Refuse a port that another program holds; ConfigError names it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as e:
            raise ConfigError(
                f"--port {port} cannot be used on this machine ({e}); choose another, or leave it out for a free one"
            ) from None
