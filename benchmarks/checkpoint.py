"""What a checkpoint costs on this machine and disk, beside what the machine itself could do and beside plain DCP.

    python benchmarks/checkpoint.py                        about 2 minutes; a quarter of a GiB of weights and moments
    python benchmarks/checkpoint.py --dir /scratch --d-model 2048 --rounds 9
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py   each rank writes its half

The real engine and the real Checkpointer. In each round, each after everything before it is on the disk, and each round
begins with another one:

    raw     as many bytes written to one file a rank, in pieces of the same size, and synced: the disk
    eager   the same, each piece sent on to the disk at once, as a checkpoint's are: the best that writing can be
    copy    as many bytes copied into memory that has been written before: the least that an asynchronous save can stall
    sync    a synchronous save: files, checksums, manifest, marker, all synced; the step waits for all of it
    async   an asynchronous save: what the step waits for, and how long until the checkpoint is whole
    dcp     torch.distributed.checkpoint.save of the same state with its own writer: synced; no checksum, no marker
    read    a file a rank of as many bytes read from the disk: the least that loading can take
    load    verification of every byte of a checkpoint on the disk, then reading into the engine

Ratios are within a round; the medians over rounds are printed, and a line of JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from pretrain.config_file import parse_config
from pretrain.dist import World, world
from pretrain.parallel.build import build_engine
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import Checkpointer, choose, read_state
from pretrain.train.optimizer import build_optimizer

PIECE = 16 << 20  # bytes of one write of a raw file, and of a checkpoint's


def timed(work: Callable[[], Any], ranks: World) -> float:
    """Seconds until the last rank is done."""
    if ranks.size > 1:
        dist.barrier()
    start = time.perf_counter()
    work()
    if ranks.size > 1:
        dist.barrier()
    return time.perf_counter() - start


def raw_write(path: Path, size: int, *, eager: bool = False) -> None:
    data = memoryview(os.urandom(PIECE))
    with open(path, "wb", buffering=0) as f:
        for begin in range(0, size, PIECE):
            written = f.write(data[: min(PIECE, size - begin)])
            if eager:
                os.posix_fadvise(f.fileno(), begin, written, os.POSIX_FADV_DONTNEED)
        os.fsync(f.fileno())


def raw_read(path: Path) -> None:
    buffer = bytearray(PIECE)
    with open(path, "rb", buffering=0) as f:
        while f.readinto(buffer):
            pass


def forget(folder: Path) -> None:
    """Take a folder's files, which are on the disk, out of memory, so that reading them is reading the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(args: argparse.Namespace, ranks: World, where: Path) -> dict[str, Any]:
    heads = args.d_model // 64
    raw = {
        "run": {"name": "benchmark", "dir": str(where)},
        "model": {"vocab_size": 32_000, "d_model": args.d_model, "n_layers": args.layers, "n_heads": heads}
        | {"n_kv_heads": heads, "d_ff": 4 * args.d_model, "max_seq_len": 128},
        "data": {"sources": [{"path": "none"}], "seq_len": 128},
        "train": {"steps": 1, "global_batch_size": ranks.size},
        "schedule": {"warmup_steps": 0},
        "optimizer": {"lr": 1e-3},
        "compile": {"enabled": False},
    }
    cfg = parse_config(raw)
    engine = build_engine(cfg, cfg.layout(ranks.size), ranks, lambda model: build_optimizer(model, cfg.optimizer))
    local = [t.to_local() if isinstance(t, DTensor) else t for t in engine.state().values()]
    with torch.no_grad():
        for tensor in local:  # moments that were never written are one page of zeros, which costs nothing to read
            tensor.uniform_()
    size = sum(t.numel() * t.element_size() for t in local)
    whole_at: list[float] = []
    checkpointer = Checkpointer(
        where, ranks, keep=1, keep_every=0, event=lambda *a, **details: whole_at.append(time.perf_counter())
    )
    folder.checkpoints_dir(where).mkdir(parents=True, exist_ok=True)
    copies = [torch.zeros_like(t, device="cpu") for t in local]
    written, kept = where / f"raw-{ranks.rank}", where / f"kept-{ranks.rank}"
    steps = iter(range(1, 10**6))
    seconds: dict[str, float] = {}

    def save(background: bool) -> None:
        checkpointer.save(next(steps), engine.state(), {"step": 0}, background=background)

    def save_in_background() -> None:
        start = time.perf_counter()
        seconds["stall"] = timed(lambda: save(True), ranks)
        checkpointer.wait()
        if ranks.first:
            seconds["async"] = whole_at[-1] - start

    def load() -> None:
        newest = choose(where, ranks, print)
        assert newest is not None
        state = engine.state()
        read_state(newest, state)
        engine.load(state)

    def settle() -> None:
        checkpointer.wait()
        if ranks.first:
            for file in where.glob("raw-*"):
                file.unlink()
            shutil.rmtree(where / "plain", ignore_errors=True)
            os.sync()
            forget(where)

    sides: dict[str, Callable[[], Any]] = {
        "raw": lambda: raw_write(written, size),
        "eager": lambda: raw_write(written, size, eager=True),
        "sync": lambda: save(False),
        "dcp": lambda: dcp.save(engine.state(), checkpoint_id=where / "plain"),
        "copy": lambda: [c.copy_(t) for c, t in zip(copies, local, strict=True)],
        "background": save_in_background,
        "read": lambda: raw_read(kept),
        "load": load,
    }
    raw_write(kept, size)
    rounds: list[dict[str, float]] = []
    for number in range(args.rounds + 1):
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            timed(settle, ranks)
            seconds[name] = timed(sides[name], ranks)
        if number:  # the first round warms up
            rounds.append(dict(seconds))
    if not ranks.first:
        return {}
    total = sum(p.numel() for p in engine.model.parameters()) * 12
    median = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    ratio = {
        f"{a}/{b}": statistics.median(r[a] / r[b] for r in rounds)
        for a, b in (
            ("raw", "sync"),
            ("eager", "sync"),
            ("raw", "async"),
            ("dcp", "sync"),
            ("stall", "copy"),
            ("stall", "sync"),
            ("load", "read"),
        )
    }
    return {"bytes": total, "ranks": ranks.size, "seconds": median, "ratios": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure; default: the system's temporary one")
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with world(600) as ranks:
        box = [tempfile.mkdtemp(prefix="checkpoint-", dir=args.dir) if ranks.first else None]
        if ranks.size > 1:
            dist.broadcast_object_list(box)
        try:
            found = measure(args, ranks, Path(str(box[0])))
        finally:
            if ranks.first:
                shutil.rmtree(str(box[0]), ignore_errors=True)
        if ranks.first:
            s, r, mb = found["seconds"], found["ratios"], found["bytes"] / 1e6
            print(f"{mb:,.0f} MB on {ranks.size} ranks, medians of {args.rounds} rounds")
            for name, text in (
                ("raw", "a raw write of as many bytes"),
                ("eager", "the same, each piece sent on at once"),
                ("sync", "a synchronous save"),
                ("async", "an asynchronous save until it is whole"),
                ("dcp", "plain torch.distributed.checkpoint"),
                ("load", "verify every byte on the disk and load"),
                ("read", "read a raw file from the disk"),
            ):
                print(f"{name:6} {s[name]:7.3f} s {mb / s[name]:8,.0f} MB/s   {text}")
            print(f"{'stall':6} {s['stall']:7.3f} s   a step's wait when asynchronous; a bare copy {s['copy']:.3f} s")
            print(
                f"sync over raw {r['raw/sync']:.2f}, over eager {r['eager/sync']:.2f}, over dcp {r['dcp/sync']:.2f}; "
                f"async over raw {r['raw/async']:.2f}"
            )
            print(f"load over reading {r['load/read']:.2f}")
            print(f"stall over a bare copy {r['stall/copy']:.2f}, over a synchronous save {r['stall/sync']:.3f}")
            print(json.dumps(found))


if __name__ == "__main__":
    main()
