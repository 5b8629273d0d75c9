"""`pretrain-launch status RUN` and `stop RUN`: a run seen from its folder, and a person's wish to end it."""

import statistics
import time
from pathlib import Path
from typing import Any

from launch import free, ledger, run_folder, slurm_commands
from pretrain.config_file import load_config
from pretrain.errors import ConfigError

_RECENT = 20  # windows of metrics that the rate is the median of


def describe(run: Path, *, lines: int = 10, now: float | None = None) -> str:
    """State, last step, rate, MFU, restarts, where the time went, and the end of the log."""
    require_run(run)
    now = time.time() if now is None else now
    metrics = [record for record in run_folder.records(run / "metrics.jsonl") if "loss" in record]
    events = run_folder.records(run / "events.jsonl")
    job = ledger.last_job(run)
    found = slurm_commands.state(job) if job is not None else None
    said = [f"run       {run}", f"state     {state(run, metrics, now, found or '')}"]
    if job is not None:
        why = slurm_commands.reason(job) if found is not None and "PENDING" in found else None
        said.append(f"job       {job} ({found or 'not known to SLURM any more'}{f': {why}' if why else ''})")
    if metrics:
        said += _progress(run, metrics)
    said += _story(run, events)
    log = newest_log(run)
    if log is not None and lines > 0:
        said += [f"log       {log}", *log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]]
    return "\n".join(said)


def require_run(run: Path) -> None:
    if not (run / "config.toml").exists() and not ledger.path_of(run).exists():
        raise ConfigError(f"{run}: no run folder (it has no config.toml); give the run.dir of a run that was started")


def state(run: Path, metrics: list[dict[str, Any]], now: float, job: str = "") -> str:
    """In words; `job` is what SLURM calls the run's newest job, if it has one."""
    outcome = run_folder.read_outcome(run)
    if outcome is not None:
        text = f"{outcome['reason']} at step {outcome['step']} (status {outcome['status']})"
        text += f": {outcome['message']}" if outcome.get("message") else ""
        if outcome["reason"] in ("preempted", "time_limit") and ("PENDING" in job or "RUNNING" in job):
            return f"{'waiting' if 'PENDING' in job else 'starting'} to go on after {text}"
        return text
    if "PENDING" in job:
        return "waiting in SLURM's queue"
    if not metrics:
        return "starting" if "RUNNING" in job else "no step logged yet, and no outcome"
    quiet = now - (run / "metrics.jsonl").stat().st_mtime
    usual = statistics.median(record.get("step_seconds") or 0.0 for record in metrics[-_RECENT:])
    gap = metrics[-1]["step"] - metrics[-2]["step"] if len(metrics) > 1 else 1
    if quiet > max(60.0, 10 * usual * max(gap, 1)):
        return f"silent for {quiet:,.0f} s: crashed, stopped from outside or hanging (no outcome)"
    return "running"


def _progress(run: Path, metrics: list[dict[str, Any]]) -> list[str]:
    last, recent = metrics[-1], metrics[-_RECENT:]
    total = _total_steps(run)
    said = [f"step      {last['step']}" + (f"/{total} ({last['step'] / total:.1%})" if total else "")]
    said[-1] += f", loss {last['loss']:.4f}" if last.get("loss") is not None else ", loss not finite"
    rate = [record["tokens_per_second"] for record in recent if record.get("tokens_per_second")]
    if rate:
        said.append(f"rate      {statistics.median(rate):,.0f} tokens/s")
        mfu = [record["mfu_causal"] for record in recent if record.get("mfu_causal") is not None]
        if mfu:
            said[-1] += f", MFU {statistics.median(mfu):.1%} (causal)"
        seconds = [record["step_seconds"] for record in recent if record.get("step_seconds")]
        if total and seconds:
            said[-1] += f", {(total - last['step']) * statistics.median(seconds) / 3600:,.1f} h to go"
    return said


def _story(run: Path, events: list[dict[str, Any]]) -> list[str]:
    starts = [event for event in events if event.get("event") == "start"]
    said = [f"starts    {len(starts)} ({max(len(starts) - 1, 0)} restarts)"]
    for end in [record for record in ledger.read(run) if record.get("event") == "end"][-5:]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(end["time"]))
        said.append(f"          {when} job {end['job']}: {end['reason']} at step {end['step']}, {end['decision']}")
    return said


def newest_log(run: Path) -> Path | None:
    logs = [path for path in (run / "logs").glob("*") if path.is_file() and path.stat().st_size]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def _total_steps(run: Path) -> int | None:
    try:
        return load_config(run / "config.toml").steps
    except ConfigError:
        return None


def stop(run: Path) -> str:
    """Ask the run to save and leave after the step in hand; what to tell the person."""
    require_run(run)
    who, outcome = free.holder(run), run_folder.read_outcome(run)
    if who is None and outcome is not None:
        raise ConfigError(f"{run} has nothing to stop: it ended, {outcome['reason']}, at step {outcome['step']}")
    (run / "STOP").touch()
    if who is None:
        return f"{run}/STOP is there, but no job or process of this run is known here; who reads it saves and ends"
    if "PENDING" in who:
        return f"{run}/STOP is there, but {who} has not started: it will start, read it and leave; or scancel it"
    return f"{run}/STOP is there: {who} saves after the step in hand and ends; nothing starts it again by itself"
