"""One attempt of a run: folder, data, engine, resume, the loop, and the outcome that launchers read.

`run_training` is what `pretrain train` calls on every rank. Decided ends write RUN/outcome.json; a crash writes
none and leaves its traceback in RUN/logs/rank-N.log.
"""

import logging
import sys
from pathlib import Path
from typing import Literal

from data_prep.errors import DataError
from pretrain.config import Config, Layout
from pretrain.dist import World, launch_environment, under_torchrun, world
from pretrain.errors import AnomalyError, CheckpointError, ConfigError
from pretrain.metrics.sinks import check_sinks
from pretrain.train.resume import check_allowed
from pretrain.train.run_folder import (
    EXIT_STATUS,
    Status,
    only_start,
    open_run_folder,
    rank_log,
    record_refusal,
    write_outcome,
)
from pretrain.train.setup import Setup
from pretrain.train.stop import Reason, Stop


def run_training(cfg: Config, *, resume: Literal["auto", "never"], allow_change: set[str]) -> int:
    """Train until a decided end; the process's exit status (0 for every decided end under torchrun)."""
    reason: Status = "refused"
    if not _refused_before_the_ranks_meet(cfg, allow_change):
        stop = Stop(Path(cfg.run.dir))
        with stop.listening(), world(cfg.run.timeout_seconds) as ranks:
            reason = train_in(ranks, cfg, stop, resume=resume, allow_change=allow_change)
    return 0 if under_torchrun() else EXIT_STATUS[reason]


def _refused_before_the_ranks_meet(cfg: Config, allow_change: set[str]) -> bool:
    """Whether the run's outcome says so; ConfigError where there is none to say it in."""
    me = launch_environment()
    try:
        cfg.layout(me["size"])
        check_allowed(allow_change, cfg.model_dump(by_alias=True))
        check_sinks(cfg.metrics.sinks)
    except ConfigError as e:
        if not record_refusal(cfg, str(e), first=me["rank"] == 0):
            raise
        if me["rank"] == 0:
            print(f"error: {e}", file=sys.stderr, flush=True)
        return True
    return False


def train_in(
    ranks: World,
    cfg: Config,
    stop: Stop,
    *,
    resume: Literal["auto", "never"] = "auto",
    allow_change: set[str] | None = None,
) -> Status:
    """One attempt in a world that has been joined; how it ended, as written to RUN/outcome.json."""
    run = Path(cfg.run.dir)
    layout = cfg.layout(ranks.size)
    with only_start(run, ranks):
        attempt = open_run_folder(cfg, ranks)
        with rank_log(run, ranks):
            reason, step, message = _attempt(cfg, layout, ranks, stop, attempt, resume, allow_change or set())
            if message:
                logging.getLogger("pretrain").error("%s at step %d: %s", reason, step, message)
        if ranks.first:
            if message:  # first, as an outcome may find no room
                print(f"error: {message}", flush=True)
            write_outcome(run, reason, step, attempt, message)
    return reason


def _attempt(
    cfg: Config, layout: Layout, ranks: World, stop: Stop, attempt: int, resume: str, allow_change: set[str]
) -> tuple[Status, int, str]:
    """(reason, step, message) of a decided end; anything else is raised and is a crash."""
    setup = Setup(cfg, layout, ranks, attempt)
    try:
        try:
            trainer = setup.trainer(stop, resume, allow_change)
        except (ConfigError, DataError, CheckpointError) as e:  # also damaged, of another shape, or no room
            return "refused", 0, str(e)
        reason = trainer.train()
        stop.honoured(ranks)
        status: Status = "finished" if reason is Reason.none else reason.name  # type: ignore[assignment]
        if ranks.first:
            event = {"finished": "finish", "preempted": "preempt"}.get(status, "stop")
            setup.sinks.event(event, trainer.done, reason=status)
        return status, trainer.done, ""
    except DataError as e:
        return "refused", trainer.done, str(e)
    except AnomalyError as e:
        return "anomaly", trainer.done, str(e)
    finally:
        setup.close()
