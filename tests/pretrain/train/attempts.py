"""Runs of a small model, broken off and resumed, in ranks that have been started once; and what they leave behind."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from small import small_config

from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import read_whole

Job = tuple[dict[str, Any], list[int]]
"""Changes to the small config, and the steps after which RUN/STOP is touched, one an attempt."""


def run_jobs(root: str, jobs: list[Job]) -> list[list[str]]:
    """Each job's attempts one after another, the last to the end; how each attempt ended."""
    from pretrain.dist import world

    with world(120) as ranks:
        return [[attempt(ranks, root, changes, stop) for stop in [*stops, None]] for changes, stops in jobs]


def run_first_attempts(root: str, jobs: list[Job]) -> list[str]:
    """Of each job the attempt up to its first stop, or to the end where it has none."""
    from pretrain.dist import world

    with world(120) as ranks:
        return [attempt(ranks, root, changes, next(iter(stops), None)) for changes, stops in jobs]


def attempt(ranks: Any, root: str, changes: dict[str, Any], stop_after: int | None) -> str:
    from pretrain.metrics.sinks import Sinks
    from pretrain.train.run import train_in
    from pretrain.train.stop import Stop

    # Validation before every save: a forward without a backward must leave no trace in a checkpoint.
    changes = {"eval__every": 1} | changes
    run = Path(root, changes.pop("name"))
    cfg = small_config(run, Path(root, "data"), **changes)
    plain = Sinks.write

    def write(self: Sinks, record: dict[str, Any]) -> None:
        plain(self, record)
        if record["step"] == stop_after and ranks.first:
            (run / "STOP").touch()

    Sinks.write = write  # type: ignore[method-assign]
    try:
        return train_in(ranks, cfg, Stop(run))
    finally:
        Sinks.write = plain  # type: ignore[method-assign]


def final_state(run: Path) -> dict[str, torch.Tensor]:
    return state_of(folder.newest_whole(run))


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read_whole(checkpoint)


def lines(run: Path, *keys: str) -> dict[int, tuple[Any, ...]]:
    """The last training line of each step, its given keys."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: tuple(r[k] for k in keys) for r in records if "val_loss" not in r}


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


@contextmanager
def scaled_loss(engine: Any, factor: float) -> Iterator[None]:
    """The engine's losses times `factor` while inside."""
    forward = engine.forward

    def scaled(batch: Any) -> Any:
        sums = forward(batch)
        return sums._replace(total=sums.total * factor, cross_entropy=sums.cross_entropy * factor)

    engine.forward = scaled
    try:
        yield
    finally:
        del engine.forward


ENGINES = {
    "fsdp": {},
    "zero1": {"parallel__engine": "zero", "parallel__zero_stage": 1},
    "zero2": {"parallel__engine": "zero", "parallel__zero_stage": 2},
    "zero3": {"parallel__engine": "zero", "parallel__zero_stage": 3},
}
