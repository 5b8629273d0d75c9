"""The health gate before training: what `pretrain doctor` is asked, and which nodes its reports call bad.

The batch script runs `pretrain doctor` on every rank by `launch.node`; this only makes the question and reads the
answers. Standard library only.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import run_folder

if TYPE_CHECKING:
    from launch.cluster import Cluster

_FOLDER = "the run's folder"  # how `pretrain doctor` begins a problem with it


def doctor_command(cluster: "Cluster", run: str, report: str) -> list[str]:
    """What follows `python -m` on every rank; the strings may hold the shell's variables."""
    health = cluster.health
    return [
        "pretrain", "doctor", "--report", report, "--run", run,
        "--expect-gpus", str(cluster.node.gpus),
        "--timeout", str(health.timeout_seconds),
        "--max-clock-skew", str(health.max_clock_skew_seconds),
        "--min-free-disk", str(health.min_free_disk_gib),
        "--max-used-memory", str(health.max_used_memory_gib),
        "--min-allreduce", str(health.min_allreduce_gb_per_second),
        "--min-share-of-median", str(health.min_share_of_median),
        "--message-mib", str(health.message_mib),
    ]  # fmt: skip


def bad_nodes(report: Path) -> dict[str, str]:
    """node -> what is wrong with it. A node that has said nothing while another has is bad too."""
    found = _problems(report)
    bad = {node: "; ".join(problems) for node, problems in found.items() if problems}
    if not (report / "summary.json").exists() and found:
        started = {str(note["node"]) for note in _read(report.glob("ranks/*/started.json"))}
        bad |= {node: "no report in time" for node in started - found.keys()}
    return bad


def of_the_folder(report: Path) -> str:
    """What every node finds wrong with the run's folder, as one of them says it: a full disk is no node's fault."""
    found = [[text for text in problems if text.startswith(_FOLDER)] for problems in _problems(report).values()]
    return "; ".join(found[0]) if found and all(found) else ""


def _problems(report: Path) -> dict[str, list[str]]:
    """Of each node: what it has said, and what the meeting of all has found."""
    said = {str(note["node"]): list(note["problems"]) for note in _read(report.glob("node-*.json"))}
    for summary in _read([report / "summary.json"]):
        for node, problems in summary["problems"].items():
            said[node] = list(dict.fromkeys([*said.get(node, []), *problems]))
    return said


def _read(paths: Any) -> list[dict[str, Any]]:
    notes = []
    for path in paths:
        try:
            notes.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, *run_folder.BROKEN):
            continue
    return notes
