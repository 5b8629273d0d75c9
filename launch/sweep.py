"""`pretrain-launch sweep DIR`: the runs that `pretrain scale ladder` made, as one throttled array; one task, one run.

Launching again submits only what is neither finished nor alive. A point that decays from another's checkpoint waits in
a second array until the first has ended well.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch import free, ledger, run_folder, slurm
from launch.cluster import Cluster
from pretrain.config import Config
from pretrain.config_file import load_config
from pretrain.errors import ConfigError


class Point(NamedTuple):
    """A run of the sweep and how it stands."""

    row: dict[str, Any]  # of DIR/table.json
    config: Config
    run: Path
    state: str  # finished | alive | the reason of its last end | new


def launch(
    folder: Path,
    cluster: Cluster,
    *,
    shape: slurm.Shape,
    at_once: int,
    chdir: Path,
    dry_run: bool,
    say: Callable[[str], None],
) -> int:
    """Show the table; submit what is to run. ConfigError before the first submission, else status 0."""
    if at_once < 1:
        raise ConfigError(f"--at-once {at_once}: at least one run must go at a time")
    points = read_points(folder, chdir)
    for point in points:
        point.config.layout(shape.nodes * cluster.node.processes)
    say(table(points))
    waves = plan_waves(points)
    if dry_run or not waves:
        busy = any(point.state == "alive" for point in points)
        rest = "all that is left is running or waiting" if busy else "nothing is left to run"
        say("nothing was submitted" if dry_run else rest)
        return 0
    for point in (point for wave in waves for point in wave):
        free.require_free(point.run, point.config.run.name, say)
    after = None
    for wave in waves:
        after = _submit(wave, folder.resolve(), cluster, shape, at_once, chdir.resolve(), after, say)
    return 0


def read_points(folder: Path, chdir: Path) -> list[Point]:
    path = folder / "table.json"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["points"]
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; make the folder with pretrain scale ladder LADDER.toml --out"
        ) from None
    except (OSError, *run_folder.BROKEN, KeyError, TypeError) as e:
        raise ConfigError(f"{path}: cannot be read as a ladder's table ({type(e).__name__}: {e})") from None
    points = []
    for row in rows:
        cfg = load_config(folder / row["config"])
        run = (chdir / cfg.run.dir).resolve()
        points.append(Point(row, cfg, run, _state(run)))
    return points


def _state(run: Path) -> str:
    outcome = run_folder.read_outcome(run)
    if outcome is not None and outcome["reason"] == "finished":
        return "finished"
    if free.holder(run) is not None:
        return "alive"
    if ledger.last_job(run) is None and outcome is None:
        return "new"
    return str(outcome["reason"]) if outcome is not None else "crashed"


def plan_waves(points: Sequence[Point]) -> list[list[Point]]:
    """What to submit: first the points that wait for nobody, then those that wait for one of these."""
    states = {point.row["name"]: point.state for point in points}
    left = [point for point in points if point.state not in ("finished", "alive")]
    waiting = [point for point in left if point.row.get("after") and states.get(point.row["after"]) != "finished"]
    for point in waiting:
        if states.get(point.row["after"]) == "alive":
            raise ConfigError(
                f"point {point.row['name']} starts from a checkpoint of {point.row['after']}, which is still running; "
                "launch the sweep again when it has finished"
            )
    ready = [point for point in left if point not in waiting]
    return [wave for wave in (ready, waiting) if wave]


def table(points: Sequence[Point]) -> str:
    lines = [f"{'run':<40}{'params':>10}{'tokens':>10}{'steps':>8}{'GPU hours':>11}  state"]
    for point in points:
        row = point.row
        after = f", after {row['after']}" if row.get("after") else ""
        lines.append(
            f"{row['name']:<40}{row['params']:>10.3g}{row['tokens']:>10.3g}{row['steps']:>8}"
            f"{_hours([point]):>11}  {point.state}{after}"
        )
    left = [point for point in points if point.state not in ("finished", "alive")]
    lines.append(f"{len(left)} of {len(points)} runs to submit, {_hours(left)} of {_hours(points)} GPU hours")
    return "\n".join(lines)


def _hours(points: Sequence[Point]) -> str:
    hours = [point.row["gpu_hours"] for point in points if point.row.get("gpu_hours") is not None]
    return f"{sum(hours):,.3g}" if len(hours) == len(points) else "?"


def _submit(
    wave: Sequence[Point],
    folder: Path,
    cluster: Cluster,
    shape: slurm.Shape,
    at_once: int,
    chdir: Path,
    after: str | None,
    say: Callable[[str], None],
) -> str:
    """One array over the points of a wave; its id. All points share one snapshot of the code."""
    job = slurm.next_folder(folder)
    slurm.snapshot_code(job)
    folders = []
    for point in wave:
        place = slurm.Place(point.run, slurm.next_folder(point.run), chdir)
        slurm.write_settings(place, point.config, cluster)
        os.symlink(job / "code", place.job / "code")
        os.symlink(job / "train.sbatch", place.job / "train.sbatch")
        folders.append(place.job)
    points_file = job / "points.txt"
    points_file.write_text("".join(f"{path}\n" for path in folders), encoding="utf-8")
    array = slurm.Array(points_file, folder.name, list(range(len(wave))), at_once)
    text = slurm.render_sbatch(wave[0].config, cluster, slurm.Place(folder, job, chdir), shape, array=array)
    (job / "train.sbatch").write_text(text, encoding="utf-8")
    options = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after is not None else []
    submitted = slurm.hand_over(job / "train.sbatch", chdir=chdir, made=[*folders, job], options=options)
    for index, point in enumerate(wave):
        ledger.add(
            point.run, "submit", job=f"{submitted}_{index}", folder=str(folders[index]), after=None,
            exclude=list(cluster.slurm.exclude),
        )  # fmt: skip
    say(f"job {submitted}: {len(wave)} runs, {at_once} at a time" + (f", after job {after}" if after else ""))
    return submitted
