"""One training step of our model beside those of other trainers and beside the floor, on this machine's CPU.

    python benchmarks/step.py                                      all tables; about 15 minutes on 2 quiet cores
    python benchmarks/step.py speed --modes bf16/eager --rounds 9
    python benchmarks/step.py recompute loss ranks memory
    python benchmarks/step.py speed --threads 1 --clock cpu        on a machine that others use at the same time

A step is forward, loss, backward, clipping by the global norm and fused AdamW. The floor is its matrix products
(forward, by input, by weight) and its attention, bare: no norm, no loss, no optimizer. Every side is a process of its
own (`sides.py`), which waits while the others step: so they take turns in one run, a machine that drifts drifts for
all, and a ratio is the median over rounds of the ratio within a round. litgpt, torchtitan and OLMo-core run in
environments of their own below PEERS (`lg`, `tt`, `ol`); one that is not there is reported as absent.

    speed      tokens/s of every side, and its time over the floor's
    recompute  ours: what each mode of activation checkpointing costs and saves
    loss       ours: the loss in chunks beside all logits at once, at two vocabularies
    ranks      ours: FSDP2 on 2 ranks x 1 thread beside 1 rank x 2 threads
    memory     ours and transformers', alone: the highest resident set above what the imports left (Linux)

Precisions: `fp32`; `bf16`, weights and everything else; `mixed`, fp32 weights with bf16 compute (our FSDP2 engine,
torch.autocast around the others). Compiled: blocks for us, torchtitan and OLMo-core, the model for the others.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sides import Job

HERE = Path(__file__).resolve().parent
PEERS = Path(os.environ.get("PEERS", Path.home() / "peers-lab"))
ENVIRONMENTS = {"litgpt": "lg", "torchtitan": "tt", "olmo_core": "ol"}
SIDES = ("ours", "transformers", *ENVIRONMENTS, "floor")
MODES = ("fp32/eager", "bf16/eager", "mixed/eager", "fp32/compiled", "bf16/compiled")
TABLES = ("speed", "recompute", "loss", "ranks", "memory")
GIB = 1 << 30
WARM_UP = 2


class Side:
    """The processes of one job; `step` lets them take one step together."""

    def __init__(self, job: Job) -> None:
        self.job = job
        folder = ENVIRONMENTS.get(job.side)
        python = sys.executable if folder is None else str(PEERS / folder / "bin" / "python")
        environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(29_700 + os.getpid() % 200), "WORLD_SIZE": str(job.ranks)}
        self._ranks = [
            subprocess.Popen(
                [python, str(HERE / "sides.py"), json.dumps(asdict(job))],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if folder else None,
                text=True,
            )
            for rank in range(job.ranks)
        ]
        self.parameters = self._answers()[0]["parameters"]

    def step(self) -> dict[str, float]:
        """Seconds of the slowest rank, bytes of the fullest, the loss."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        answers = self._answers()
        return answers[0] | {key: max(a[key] for a in answers) for key in ("seconds", "cpu_seconds", "peak_bytes")}

    def close(self) -> None:
        for rank in self._ranks:
            rank.communicate()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            trouble = [rank.stderr.read().strip() for rank in self._ranks if rank.stderr is not None]
            raise SystemExit(f"{self.job.side} ended early: {' '.join(trouble)[-500:]}")
        return [json.loads(line) for line in lines]


def take_turns(jobs: dict[str, Job], rounds: int, clock: str) -> dict[str, dict[str, Any]]:
    """Seconds of a step by name, a median and by round, and the peak; every side steps once a round."""
    sides = {name: Side(job) for name, job in jobs.items()}
    losses = {name: side.step()["loss"] for name, side in sides.items()}
    for _ in range(WARM_UP - 1):
        for side in sides.values():
            side.step()
    names = list(sides)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(sides[name].step())
    out = {}
    for name, steps in taken.items():
        seconds = [step["seconds" if clock == "wall" else "cpu_seconds"] for step in steps]
        peak = max(step["peak_bytes"] for step in steps) / GIB
        tokens = jobs[name].batch * jobs[name].seq_len
        out[name] = {"tokens_per_second": tokens / statistics.median(seconds), "rounds": seconds, "peak_gib": peak}
        out[name] |= {"first_loss": losses[name], "parameters": sides[name].parameters}
        sides[name].close()
    return out


def ratio(results: dict[str, dict[str, Any]], a: str, b: str) -> float:
    """How many times as long as b's a's step takes."""
    return statistics.median(x / y for x, y in zip(results[a]["rounds"], results[b]["rounds"], strict=True))


def speed(base: Job, args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    print("| step | side | tokens/s | over floor | peak GiB |\n|---|---|---|---|---|")
    for mode in args.modes:
        precision, how = mode.split("/")
        job = replace(base, precision=precision, compiled=how == "compiled")
        jobs = {name: replace(job, side=name) for name in args.sides if present(name)}
        results = found[mode] = take_turns(jobs, args.rounds, args.clock)
        check_losses(mode, results)
        for name in args.sides:
            if name not in results:
                print(f"| {mode} | {name} | absent | | |")
                continue
            over = f"{ratio(results, name, 'floor'):.3f}" if "floor" in results else ""
            row = results[name]
            print(f"| {mode} | {name} | {row['tokens_per_second']:,.0f} | {over} | {row['peak_gib']:.2f} |", flush=True)
    return found


def check_losses(mode: str, results: dict[str, dict[str, Any]]) -> None:
    """Ours and transformers' start from the same weights; all have as many."""
    if {"ours", "transformers"} <= set(results):
        one, other = (results[name]["first_loss"] for name in ("ours", "transformers"))
        bound = 1e-5 if mode.startswith("fp32") else 5e-3
        assert abs(one / other - 1) < bound, f"{mode}: losses {one} and {other} on the same weights"
    counts = {name: row["parameters"] for name, row in results.items() if row["parameters"]}
    assert len(set(counts.values())) <= 1, f"the sides differ in size: {counts}"


def present(side: str) -> bool:
    return side not in ENVIRONMENTS or (PEERS / ENVIRONMENTS[side] / "bin" / "python").exists()


def recompute(base: Job, args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    print("| step | recompute | tokens/s | time over none | peak GiB |\n|---|---|---|---|---|")
    for precision in ("fp32", "bf16"):
        jobs = {mode: replace(base, precision=precision, recompute=mode) for mode in ("none", "selective", "full")}
        results = found[precision] = take_turns(jobs, args.rounds, args.clock)
        for mode, row in results.items():
            over = ratio(results, mode, "none")
            print(f"| {precision} | {mode} | {row['tokens_per_second']:,.0f} | {over:.2f} | {row['peak_gib']:.2f} |")
    return found


def loss(base: Job, args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    print("| step | vocabulary | chunks | tokens/s | peak GiB |\n|---|---|---|---|---|")
    for precision in ("fp32", "bf16"):
        for vocab in (base.vocab, args.large_vocab):
            job = replace(base, precision=precision, vocab=vocab, layers=2)
            jobs = {str(chunks): replace(job, chunks=chunks) for chunks in (base.chunks, 1)}
            results = found[f"{precision}/{vocab}"] = take_turns(jobs, args.rounds, args.clock)
            for chunks, row in results.items():
                speed, peak = row["tokens_per_second"], row["peak_gib"]
                print(f"| {precision} | {vocab:,} | {chunks} | {speed:,.0f} | {peak:.2f} |", flush=True)
    return found


def ranks(base: Job, args: argparse.Namespace) -> dict[str, Any]:
    job = replace(base, precision="mixed")
    jobs = {"1 rank x 2 threads": replace(job, threads=2), "2 ranks x 1 thread": replace(job, ranks=2, threads=1)}
    results = take_turns(jobs, args.rounds, "wall")
    for name, row in results.items():
        print(f"mixed/eager, {name}: {row['tokens_per_second']:,.0f} tokens/s")
    print(f"2 ranks over 1: {ratio(results, *jobs):.2f} of its speed", flush=True)
    return results


def memory(base: Job, args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    print("| step | vocabulary | ours, GiB | transformers | ratio |\n|---|---|---|---|---|")
    for vocab in (base.vocab, args.large_vocab):
        for precision in ("fp32", "bf16"):
            job = replace(base, precision=precision, vocab=vocab, batch=args.memory_batch)
            peaks = []
            for name in ("ours", "transformers"):  # one after the other: both would not fit
                side = Side(replace(job, side=name))
                peaks.append(max(side.step()["peak_bytes"] for _ in range(3)) / GIB)
                side.close()
            found[f"{precision}/{vocab}"] = peaks
            print(
                f"| {precision} | {vocab:,} | {peaks[0]:.2f} | {peaks[1]:.2f} | {peaks[0] / peaks[1]:.2f} |", flush=True
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)}; default all")
    sizes = {"vocab", "d_model", "layers", "heads", "kv_heads", "d_ff", "seq_len", "batch", "chunks", "threads"}
    for name, value in asdict(Job(threads=os.cpu_count() or 1)).items():
        if name in sizes:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--modes", nargs="+", default=list(MODES), help="precision/eager or precision/compiled")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: time on a core, one thread")
    parser.add_argument("--large-vocab", type=int, default=128_256)
    parser.add_argument("--memory-batch", type=int, default=8)
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads > 1:
        parser.error("--clock cpu adds up all threads, waiting ones too; give --threads 1 with it")
    if unknown := set(args.tables) - set(TABLES):
        parser.error(f"no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    base = Job(**{name: getattr(args, name) for name in sizes})
    makers = {"speed": speed, "recompute": recompute, "loss": loss, "ranks": ranks, "memory": memory}
    results: dict[str, Any] = {"job": asdict(base), "clock": args.clock}
    for name in args.tables or TABLES:
        print(f"\n{name}")
        results[name] = makers[name](base, args)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
