"""One SLURM task of a training: starts torchrun (or this rank) on its node and brings SLURM's signals to the ranks.

`srun python -m launch.node ...` runs it; SLURM signals it and nobody else of the step. It knows rank, nodes and
sizes from SLURM's variables, checks the world against them, and leaves a note of how its ranks ended, from which
`verdict` reads the node that failed first. Standard library only.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch import ranks, run_folder, torchrun

DECIDED = (0, 2, 70, 75)
"""A lone rank's statuses for the ends that it has written into outcome.json: no failure of the task."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m launch.node")
    p.add_argument("--launcher", choices=("torchrun", "srun"), required=True)
    p.add_argument("--nodes", type=int, required=True)
    p.add_argument("--ranks-per-node", type=int, required=True)
    p.add_argument("--head", required=True, help="name of the first node")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--attempt", type=Path, required=True, help="folder of this start of the job, shared by its nodes")
    p.add_argument("--max-restarts", type=int, default=0)
    p.add_argument("rank_command", nargs="+", help="what follows python -m")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        problem = check(args, os.environ)
    except KeyError as e:
        problem = f"{e.args[0]} is not set: srun starts this"
    if problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 2
    return run(args)


def check(args: argparse.Namespace, env: Mapping[str, str]) -> str | None:
    """What is wrong with the world that SLURM made, if anything."""
    per_node = 1 if args.launcher == "torchrun" else args.ranks_per_node
    if int(env["SLURM_NNODES"]) != args.nodes or int(env["SLURM_NTASKS"]) != args.nodes * per_node:
        return (
            f"srun started {env['SLURM_NTASKS']} tasks on {env['SLURM_NNODES']} nodes, but the job is of "
            f"{args.nodes} nodes x {per_node} tasks; submit it again with pretrain-launch slurm"
        )
    if args.nodes > 1 and is_loopback(args.head):
        return (
            f"the first node is called {args.head!r}, which every node takes for itself; {args.nodes} nodes cannot meet"
        )
    if env["SLURM_PROCID"] == "0":
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", args.port))
            except OSError as e:
                return (
                    f"port {args.port} of {args.head} is taken ({e.strerror}); "
                    "network.port_base in the cluster file moves it"
                )
    return None


def is_loopback(name: str) -> bool:
    return name in ("", "localhost", "::1") or name.startswith(("localhost.", "127."))


def run(args: argparse.Namespace) -> int:
    env = os.environ
    name, first = env["SLURMD_NODENAME"], env["SLURM_PROCID"] == "0"
    on_node = args.ranks_per_node
    # a task of the srun launcher was given its own share of the cores, a torchrun all of the node's
    count, why = torchrun.threads(env, on_node if args.launcher == "torchrun" else 1, torchrun.allowed_cores())
    log = args.attempt / "ranks" / name
    log.mkdir(parents=True, exist_ok=True)
    (log / "started.json").write_text(json.dumps({"node": name}) + "\n", encoding="utf-8")
    environment = env | {"OMP_NUM_THREADS": str(count), run_folder.REFUSAL: str(args.attempt / "refused")}

    def say(text: str) -> None:
        print(f"{name}: {text}", flush=True)

    if first:
        say(why)
    watch = Watch()
    if args.launcher == "torchrun":
        line = torchrun.command(
            args.rank_command,
            nproc=on_node,
            endpoint=f"{args.head}:{args.port}",
            rendezvous_id=f"{env['SLURM_JOB_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}",
            log_dir=log,
            nodes=args.nodes,
            max_restarts=args.max_restarts,
            local_address=name,
            is_host=first,
            show_first=first,
        )
        status = ranks.supervise(line, environment, watch.of(ranks.torchrun_ranks), say)
    else:
        environment |= {"MASTER_ADDR": args.head, "MASTER_PORT": str(args.port)}
        line = [sys.executable, "-u", "-m", *args.rank_command]
        output = None if first else log / f"rank-{env['SLURM_PROCID']}.log"
        status = ranks.supervise(line, environment, watch.of(ranks.lone_rank), say, output=output)
        status = 0 if status in DECIDED else status
    note = {"node": name, "task": int(env["SLURM_PROCID"]), "status": status, "first_gone": watch.first_gone}
    (args.attempt / f"task-{env['SLURM_PROCID']}.json").write_text(json.dumps(note) + "\n", encoding="utf-8")
    return 0 if status == 0 else 1


class Watch:
    """Notes when the first rank of this task has gone: over all nodes, the earliest tells where a failure began."""

    def __init__(self) -> None:
        self.first_gone: float | None = None
        self._seen: set[ranks.Process] = set()

    def of(self, find: ranks.FindRanks) -> ranks.FindRanks:
        def watched(pid: int) -> list[ranks.Process]:
            now = find(pid)
            if self._seen - set(now) and self.first_gone is None:
                self.first_gone = time.time()
            self._seen |= set(now)
            return now

        return watched


if __name__ == "__main__":
    sys.exit(main())
