"""The torchrun command line, and how many threads a rank gets. Pure functions and the standard library only."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(
    rank_command: Sequence[str],
    *,
    nproc: int,
    endpoint: str,
    rendezvous_id: str,
    log_dir: Path,
    nodes: int = 1,
    max_restarts: int = 0,
    local_address: str | None = None,
    is_host: bool | None = None,
    show_first: bool = True,
) -> list[str]:
    """torchrun for one node; `rank_command` is what follows `python -m`.

    Ranks write to LOG_DIR/<rendezvous id>_*/attempt_*/<local rank>/std{out,err}.log; the first of them writes to the
    caller's own output instead where `show_first`. A port of 0 in `endpoint` (one node) lets the kernel choose.
    c10d numbers nodes in the order of their `local_address` as text, so names that sort give ranks in node order.
    """
    redirected = range(1 if show_first else 0, nproc)
    line = [sys.executable, "-m", "torch.distributed.run"]
    line += [f"--nnodes={nodes}", f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
    line += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={rendezvous_id}"]
    line += [f"--log-dir={log_dir}"]
    if redirected:
        line += ["--redirects=" + ",".join(f"{rank}:3" for rank in redirected)]
    if is_host is not None:
        line += [f"--rdzv-conf=is_host={int(is_host)}"]  # else each node guesses from its own name and addresses
    if local_address is not None:
        line += [f"--local-addr={local_address}"]
    return [*line, "-m", *rank_command]


def allowed_cores() -> int:
    """Cores that this process may use: what taskset, a container or SLURM left of the machine's."""
    return len(os.sched_getaffinity(0))


def threads(environment: Mapping[str, str], ranks: int, cores: int) -> tuple[int, str]:
    """Threads for each of `ranks` processes on `cores` allowed cores, and the line that says why."""
    given = environment.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given), f"threads | OMP_NUM_THREADS={given}, as the environment says ({ranks} ranks, {cores} cores)"
    count = max(1, cores // ranks)
    return count, f"threads | OMP_NUM_THREADS={count}: {ranks} ranks on {cores} allowed cores"
