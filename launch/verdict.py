"""What follows when a job's training has ended: requeue, resubmit without a bad node, or leave it.

The batch script calls it last. It reads the run's own outcome, never an exit status: torchrun's tells nothing.
Standard library only, as the batch script may run outside the container.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch import health, ledger, run_folder, slurm_commands

STATUS = {"finished": 0, "refused": 2, "anomaly": 70}


class Facts(NamedTuple):
    """All that a decision rests on."""

    reason: str  # outcome.json's, or "crash" | "unhealthy" | "lost" (warned, but nothing was saved in time)
    slurm_ends_it: bool  # the script was told TERM: a person cancels, the time is over, or SLURM requeues by itself
    said: str  # the run's own words about a decided end, or what every node finds wrong
    blamed: dict[str, str]  # node -> why, in this start
    step: int  # newest whole checkpoint
    history: list[dict[str, Any]]  # earlier ends of this run's jobs
    crashes: int  # allowed in a row without a new checkpoint
    node_failures: int  # of one node before it is excluded
    excluded: list[str]  # of this job
    requeue: str  # scontrol | resubmit


class Decision(NamedTuple):
    action: str  # stop | requeue | resubmit
    why: str
    exclude: list[str]


def decide(facts: Facts) -> Decision:
    """Only a preemption, a time limit and, within the budget, a crash bring a job back."""
    if facts.slurm_ends_it:
        return Decision("stop", "SLURM is ending this job, or requeues it by itself", facts.excluded)
    if facts.reason in ("finished", "refused", "anomaly", "user"):
        return Decision("stop", _words("the run has ended", facts), facts.excluded)
    if facts.reason == "unhealthy" and not facts.blamed:
        return Decision("stop", _words("no node is at fault", facts), facts.excluded)
    fruitless = _fruitless(facts)
    if fruitless > facts.crashes:
        why = (
            f"{fruitless} starts in a row ended ({facts.reason} the last) with no checkpoint after step {facts.step}; "
            f"retry.crashes={facts.crashes}"
        )
        return Decision("stop", why, facts.excluded)
    bad = _bad_nodes(facts)
    if bad:
        return Decision("resubmit", f"{facts.reason}; without {', '.join(bad)}", sorted({*facts.excluded, *bad}))
    again = "resubmit" if facts.requeue == "resubmit" else "requeue"
    return Decision(again, facts.reason, facts.excluded)


def _words(what: str, facts: Facts) -> str:
    return f"{what}: {facts.reason}" + (f", {facts.said}" if facts.said else "")


def _fruitless(facts: Facts) -> int:
    """Ends in a row, this one included, that brought no new checkpoint; a crash counts even where it did."""
    ends = [(end["reason"], end["step"]) for end in facts.history] + [(facts.reason, facts.step)]
    count = 0
    for (_, before), (reason, step) in reversed(list(zip([("", -1), *ends[:-1]], ends, strict=True))):
        count += reason not in ("preempted", "time_limit") or step <= before
        if step > before:
            break
    return count


def _bad_nodes(facts: Facts) -> list[str]:
    if facts.reason == "unhealthy":
        return sorted(facts.blamed)
    if facts.reason != "crash":
        return []
    counts = Counter(node for end in facts.history if end["reason"] == "crash" for node in end.get("nodes", {}))
    counts.update(facts.blamed.keys())
    return sorted(node for node, times in counts.items() if times >= facts.node_failures and node not in facts.excluded)


def blame(attempt: Path) -> dict[str, str]:
    """The node whose rank was gone first in this start of the job, from the notes of its tasks."""
    notes = []
    for path in attempt.glob("task-*.json"):
        try:
            notes.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, *run_folder.BROKEN):
            continue
    failed = [note for note in notes if note.get("status") != 0 and note.get("first_gone") is not None]
    if not failed:
        return {}
    first = min(failed, key=lambda note: note["first_gone"])
    return {str(first["node"]): "its rank was the first to go"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m launch.verdict")
    p.add_argument("--run", type=Path, required=True)
    p.add_argument("--script", type=Path, required=True)
    p.add_argument("--attempt", type=Path, required=True)
    p.add_argument("--job", required=True, help="as scontrol takes it; ARRAY_TASK for a task of an array")
    p.add_argument("--stamp", required=True, help="what outcome.json was before the start")
    p.add_argument("--warned", type=int, required=True)
    p.add_argument("--ended", type=int, required=True)
    p.add_argument("--crashes", type=int, required=True)
    p.add_argument("--node-failures", type=int, required=True)
    p.add_argument("--requeue", choices=("scontrol", "resubmit"), required=True)
    p.add_argument("--exclude", default="", help="the cluster file's list")
    p.add_argument("--nodes", required=True, help="SLURM's list of the job's nodes")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    facts, env = gather(args), os.environ
    decision = decide(facts)
    state = slurm_commands.state(args.job)
    if decision.action != "stop" and state not in (None, "RUNNING"):
        decision = decision._replace(action="stop", why=f"the job is {state}: SLURM is ending it")
    print(f"verdict | {facts.reason} at step {facts.step} | {decision.action}: {decision.why}", flush=True)
    _show_failure(args, facts)
    ledger.add(
        args.run, "end", job=args.job, restart=int(env.get("SLURM_RESTART_COUNT", "0")), reason=facts.reason,
        step=facts.step, ended_by_slurm=facts.slurm_ends_it, nodes=facts.blamed, node_list=args.nodes,
        decision=decision.action, why=decision.why, exclude=decision.exclude,
    )  # fmt: skip
    try:
        _act(args, decision, env)
    except slurm_commands.SlurmError as e:
        print(f"error: {e}; start again with: sbatch {args.script}", file=sys.stderr, flush=True)
        return 1
    return STATUS.get(facts.reason, 75 if facts.reason in ("user", "preempted", "time_limit") else 1)


def gather(args: argparse.Namespace) -> Facts:
    outcome = run_folder.read_outcome(args.run) if run_folder.stamp_text(args.run) != args.stamp else None
    refused = run_folder.refusal(args.attempt / "refused")
    unhealthy = health.bad_nodes(args.attempt / "health")
    said, blamed = "", {}
    if outcome is not None:
        reason, said = str(outcome["reason"]), str(outcome.get("message", ""))
    elif refused is not None:
        reason, said = "refused", refused
    elif args.warned:
        reason = "lost"
    elif unhealthy:
        reason, said = "unhealthy", health.of_the_folder(args.attempt / "health")
        blamed = {} if said else unhealthy
    else:
        reason, blamed = "crash", blame(args.attempt)
    return Facts(
        reason=reason,
        slurm_ends_it=bool(args.ended),
        said=said,
        blamed=blamed,
        step=ledger.newest_checkpoint(args.run),
        history=ledger.ends_since_submission(args.run),
        crashes=args.crashes,
        node_failures=args.node_failures,
        excluded=sorted({*filter(None, args.exclude.split(",")), *ledger.excluded(args.run)}),
        requeue=args.requeue,
    )


def _show_failure(args: argparse.Namespace, facts: Facts) -> None:
    """At the end of the job's output: what went wrong first, on which rank, and which node is to blame."""
    for node, why in facts.blamed.items():
        print(f"blamed | {node}: {why}", flush=True)
    if facts.reason != "crash":
        return
    failure = run_folder.first_failure(args.run, {}, since=(args.attempt / "started").stat().st_mtime)
    if failure is not None:
        print(f"first error, at {failure.time} on rank {failure.rank}:\n{failure.text}", flush=True)


def _act(args: argparse.Namespace, decision: Decision, env: Mapping[str, str]) -> None:
    if decision.action == "requeue":
        slurm_commands.requeue(args.job)
    elif decision.action == "resubmit":
        options = [f"--exclude={','.join(decision.exclude)}"] if decision.exclude else []
        if "SLURM_ARRAY_TASK_ID" in env:
            options.append(f"--array={env['SLURM_ARRAY_TASK_ID']}")
        if env.get("SLURM_JOB_PARTITION"):
            options.append(f"--partition={env['SLURM_JOB_PARTITION']}")
        new = slurm_commands.submit(args.script, chdir=Path.cwd(), options=options, after=args.job)
        ledger.add(
            args.run, "submit", job=new, folder=str(args.script.parent), after=args.job, exclude=decision.exclude
        )
        print(f"resubmitted as job {new} {' '.join(options)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
