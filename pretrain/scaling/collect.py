"""From run folders to a tidy table: one row a finished run, or one a validation of it.

Reads config.toml, metrics.jsonl, events.jsonl and outcome.json. Counts come from pretrain.metrics.flops, in the
convention that the caller names. A run that has not finished, or that met an anomaly, is refused unless asked for,
since a law fitted through half a schedule is wrong without looking so.
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pretrain.config import Config
from pretrain.config_file import load_config
from pretrain.errors import ConfigError
from pretrain.metrics.flops import flops_per_token, parameter_counts

Convention = Literal["causal", "full"]
_BAD_EVENTS = ("anomaly", "skip", "rollback")


class Wanted(NamedTuple):
    """What to read and what to put up with."""

    flops: Convention = "causal"
    intermediate: bool = False  # also every validation before the last
    smooth: int = 1  # validations averaged into one loss
    tail: float = 0.02  # share of the run's tokens over which the final training loss is averaged
    unfinished: bool = False
    anomalous: bool = False


class _Run(NamedTuple):
    folder: Path
    config: Config
    training: list[dict[str, Any]]  # the last attempt's line of each step, in order
    validation: list[dict[str, Any]]
    reason: str  # of outcome.json; "none" where there is none
    events: list[str]


def collect(folders: list[str | Path], wanted: Wanted | None = None) -> list[dict[str, Any]]:
    """Rows of all runs, in the order given. A ladder's folder stands for its runs."""
    wanted = wanted or Wanted()
    runs = [_read(folder) for folder in _expand(folders)]
    complaints = [f"{run.folder}: {complaint}" for run in runs if (complaint := _complaint(run, wanted))]
    if complaints:
        raise ConfigError("; ".join(complaints))
    return [row for run in runs for row in _rows(run, wanted)]


def _expand(folders: list[str | Path]) -> list[Path]:
    found: list[Path] = []
    for folder in map(Path, folders):
        table = folder / "table.json"
        if table.is_file():
            points = json.loads(table.read_text(encoding="utf-8"))["points"]
            found += [Path(load_config(folder / point["config"]).run.dir) for point in points]
        else:
            found.append(folder)
    return found


def _read(folder: Path) -> _Run:
    for name in ("config.toml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} is no run's folder: it has no {name}")
    training: dict[int, dict[str, Any]] = {}
    validation: dict[int, dict[str, Any]] = {}
    for line in _json_lines(folder / "metrics.jsonl"):
        kind = validation if "val_loss" in line else training
        before = kind.get(line["step"])
        if before is None or line.get("attempt", 0) >= before.get("attempt", 0):
            kind[line["step"]] = line
    outcome = folder / "outcome.json"
    reason = json.loads(outcome.read_text(encoding="utf-8"))["reason"] if outcome.is_file() else "none"
    events = folder / "events.jsonl"
    return _Run(
        folder,
        load_config(folder / "config.toml"),
        [training[step] for step in sorted(training)],
        [validation[step] for step in sorted(validation)],
        reason,
        [str(line.get("event")) for line in _json_lines(events)] if events.is_file() else [],
    )


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; one that a crash cut short is passed over."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in found if isinstance(line, dict)]


def _complaint(run: _Run, wanted: Wanted) -> str | None:
    if not run.training:
        return "metrics.jsonl has no line of training"
    last, steps = run.training[-1]["step"], run.config.steps
    if not wanted.unfinished and (run.reason != "finished" or last < steps):
        return (
            f"not finished (outcome {run.reason!r}, step {last} of {steps}); go on with it, or add --unfinished "
            f"if its loss may stand for a whole schedule"
        )
    bad = sorted({event for event in run.events if event in _BAD_EVENTS})
    if not wanted.anomalous and bad:
        return f"met {', '.join(bad)} (see events.jsonl); look at it, or add --anomalous to take it all the same"
    if not math.isfinite(_mean_loss(run, wanted.tail) or math.nan):
        return "its last training loss is no number"
    return None


def _mean_loss(run: _Run, tail: float) -> float | None:
    """Mean over the last `tail` of the tokens, windows weighted by the steps that they cover."""
    end = run.training[-1]["tokens"]
    total = weight = 0.0
    before = 0
    for line in run.training:
        steps, before = line["step"] - before, line["step"]
        if line["tokens"] >= (1 - tail) * end:
            if line["loss"] is None:
                return None
            total, weight = total + steps * line["loss"], weight + steps
    return total / weight


def _noise_scale(run: _Run, step: int) -> float | None:
    """Median of what was measured over the later half of the way to `step`; None where nothing was."""
    seen = [line.get("grad_noise_scale") for line in run.training if step / 2 < line["step"] <= step]
    known = [value for value in seen if value is not None]
    return statistics.median(known) if known else None


def _rows(run: _Run, wanted: Wanted) -> list[dict[str, Any]]:
    cfg = run.config
    counts = parameter_counts(cfg.model)
    bare = counts.total - counts.embedding - counts.head
    per_token = flops_per_token(cfg.model, cfg.data.seq_len, causal=wanted.flops == "causal")
    last = run.training[-1]
    same: dict[str, Any] = {
        "run": cfg.run.name,
        "params": bare,  # without embedding and head
        "params_matmul": counts.matmul,  # with the head
        "params_total": counts.total,
    }
    rest = {
        "flops_convention": wanted.flops,
        "lr": cfg.optimizer.lr,
        "batch_rows": cfg.train.global_batch_size,
        "batch_tokens": cfg.train.global_batch_size * cfg.data.seq_len,
        "seq_len": cfg.data.seq_len,
        "d_model": cfg.model.d_model,
        "n_layers": cfg.model.n_layers,
        "schedule": cfg.schedule.name,
        "seed": cfg.run.seed,
        "outcome": run.reason,
    }
    rows = []
    tokens_at = {line["step"]: line for line in run.training}
    lines: list[dict[str, Any] | None] = [*run.validation] or [None]
    for place, line in enumerate(lines):
        final = line is None or place == len(run.validation) - 1
        if not final and not wanted.intermediate:
            continue
        at = last if line is None else tokens_at.get(line["step"], last if final else None)
        if at is None:  # validated between two logged steps: its tokens are not known
            continue
        recent = run.validation[max(0, place - wanted.smooth + 1) : place + 1]
        val = sum(one["val_loss"] for one in recent) / len(recent) if recent else None
        train = _mean_loss(run, wanted.tail) if final else at["loss"]
        epoch = at.get("epoch") or 0.0
        rows.append(
            same
            | {
                "tokens": at["tokens"],
                "unique_tokens": at["tokens"] / epoch if epoch > 1 and len(cfg.data.sources) == 1 else at["tokens"],
                "step": at["step"],
                "steps": cfg.steps,
                "kind": "final" if final else "intermediate",
                "loss": train if val is None else val,
                "loss_of": "training" if val is None else "validation",
                "train_loss": train,
                "val_loss": val,
                "val_bits_per_byte": None if line is None else line.get("val_bits_per_byte"),
                "flops": per_token * at["tokens"],
                "grad_noise_scale": _noise_scale(run, at["step"]),
            }
            | rest
        )
    return rows
