"""MFU of our training step on one GPU: Llama shapes at 8,192 tokens, recompute x compile x attention kernel.

    python benchmarks/gpu.py                                 every row; under 10 minutes on one Hopper GPU
    python benchmarks/gpu.py --shapes llama3_8b --kernels varlen --seconds 200
    python benchmarks/gpu.py --tiny                          a few rows of a small model, on a CPU too: does it run

The engine is the one that trains: FSDP2 on one rank, fp32 masters, bf16 compute, fused AdamW, clipping. A shape has as
many of its layers as fit without recomputation (the planner says), the same in all its rows. `varlen` masks documents,
of which a row has one here, so that both kernels do the same work. The matrix-product ceiling is measured in the same
run. Beside ours stands torchtitan's Llama 3, where it can be imported: sharded, compiled and timed likewise, with its
SDPA attention and all logits at once.

MFU by both conventions: `causal` counts the half of the scores that a causal kernel computes, `full` all of them.
Rows that no longer fit into --seconds are named and left out.
"""

import argparse
import gc
import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sides import ADAMW, CLIP, Job, titan_model
from torch import nn

from pretrain.config import Config
from pretrain.config_file import parse_config
from pretrain.data.loader import Batch
from pretrain.dist import World, world
from pretrain.errors import ConfigError
from pretrain.metrics.flops import flops_per_token
from pretrain.metrics.hardware import device_named, find_device
from pretrain.parallel.build import build_engine
from pretrain.plan.memory import memory
from pretrain.plan.report import Assumptions, job_from_config
from pretrain.train.optimizer import build_optimizer

SHAPES = ("llama3_8b", "llama3.2_3b", "llama3.2_1b")
RECOMPUTE = ("selective", "none", "full")
GIB = 1 << 30
TINY = {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "d_ff": 128, "vocab_size": 512}


class Row(NamedTuple):
    shape: str
    side: str  # ours | torchtitan
    kernel: str
    compiled: bool
    recompute: str

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        return f"{self.shape:11} | {self.side:10} | {self.kernel:6} | {how:8} | {self.recompute:9}"


def config(row: Row, layers: int | None, seq_len: int, *, tiny: bool) -> Config:
    sizes: dict[str, Any] = {"preset": row.shape, "attention": row.kernel} | (TINY if tiny else {})
    return parse_config(
        {
            "run": {"name": "gpu", "dir": "gpu"},
            "model": sizes | ({} if layers is None else {"n_layers": layers}),
            "data": {"sources": [{"path": "none"}], "seq_len": seq_len, "mask_documents": row.kernel == "varlen"},
            "train": {"steps": 1, "global_batch_size": 1, "grad_clip": CLIP},
            "optimizer": {"lr": ADAMW["lr"]},
            "schedule": {"warmup_steps": 0},
            "activation_checkpoint": {"mode": row.recompute},
            "compile": {"enabled": row.compiled},
        }
    )


def layers_that_fit(shape: str, seq_len: int, room: float) -> int:
    """Of a shape, without recomputation, in `room` bytes."""
    row = Row(shape, "ours", "sdpa", True, "none")
    assumptions = Assumptions(device_named("h100-sxm"))  # bytes are the same on all
    for layers in range(config(row, None, seq_len, tiny=False).model.n_layers, 1, -1):
        if memory(job_from_config(config(row, layers, seq_len, tiny=False), 1, assumptions)).peak <= room:
            return layers
    return 1


def ours(cfg: Config, place: World) -> Callable[[], None]:
    engine = build_engine(cfg, cfg.layout(1), place, lambda model: build_optimizer(model, cfg.optimizer))
    seq_len = cfg.data.seq_len
    tokens = torch.randint(cfg.model.vocab_size, (1, seq_len + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(seq_len, dtype=torch.int32).unsqueeze(0)
    ends = torch.tensor([0, seq_len], dtype=torch.int32)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:], positions, positions * 0, ends, seq_len).to(place.device)

    def step() -> None:
        engine.backward(engine.forward(batch).total / seq_len, last=True)
        engine.step(cfg.optimizer.lr)

    return step


def torchtitan(cfg: Config, place: World) -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sizes, seq_len = cfg.model, cfg.data.seq_len
    model = titan_model(
        Job(
            vocab=sizes.vocab_size,
            d_model=sizes.d_model,
            layers=sizes.n_layers,
            heads=sizes.n_heads,
            kv_heads=sizes.n_kv_heads,
            d_ff=sizes.d_ff,
            seq_len=seq_len,
        )
    ).to(place.device)
    mesh = init_device_mesh(place.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        if cfg.compile.enabled:
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    tokens = torch.randint(sizes.vocab_size, (1, seq_len + 1), device=place.device)
    positions = torch.arange(seq_len, device=place.device).unsqueeze(0)

    def step() -> None:
        logits = model(tokens[:, :-1].contiguous(), positions=positions)
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(row: Row, cfg: Config, place: World, steps: int) -> dict[str, Any]:
    """Tokens/s over `steps` steps after two that warm up, and the most memory that tensors took."""
    cuda = place.device.type == "cuda"
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    step = {"ours": ours, "torchtitan": torchtitan}[row.side](cfg, place)
    for _ in range(2):
        step()
    synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    rate = steps * cfg.data.seq_len / (time.perf_counter() - start)
    found: dict[str, Any] = {"layers": cfg.model.n_layers, "tokens_per_second": rate}
    for name, causal in (("causal", True), ("full", False)):
        found[f"tflops_{name}"] = rate * flops_per_token(cfg.model, cfg.data.seq_len, causal=causal) / 1e12
    return found | {"peak_gib": torch.cuda.max_memory_allocated() / GIB if cuda else 0.0}


def numbers(found: dict[str, Any], top: float) -> str:
    mfu = ", ".join("-" if found[key] is None else f"{found[key]:.1%}" for key in ("mfu_causal", "mfu_full"))
    speed = f"{found['layers']:6} | {found['tokens_per_second']:8,.0f}"
    flops = f"{found['tflops_causal']:12.1f}, {found['tflops_full']:6.1f}"
    return f"{speed} | {flops} | {mfu:>16} | {found['tflops_causal'] / top:11.1%} | {found['peak_gib']:.1f}"


def ceiling(device: torch.device, size: int) -> float:
    """TFLOP/s of the best of three square bf16 products."""
    a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = 0.0
    for _ in range(4):
        synchronize()
        start = time.perf_counter()
        for _ in range(10):
            a @ a
        synchronize()
        best = max(best, 10 * 2 * size**3 / (time.perf_counter() - start))
    return best / 1e12


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """The first shape in every way, the others as they would be trained; the telling ones first."""
    ways = list(itertools.product(args.kernels, (True, False), args.recompute))
    for number, shape in enumerate(args.shapes):
        for kernel, compiled, recompute in ways:
            if number == 0 or (compiled and kernel == args.kernels[0]):
                yield Row(shape, "ours", kernel, compiled, recompute)
        if importlib.util.find_spec("torchtitan") is not None:
            yield Row(shape, "torchtitan", "sdpa", True, "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="presets")
    parser.add_argument("--kernels", nargs="+", default=["varlen", "sdpa"] if cuda else ["sdpa"])
    parser.add_argument("--recompute", nargs="+", default=list(RECOMPUTE), choices=RECOMPUTE)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=540, help="no row is begun after that; default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes: correctness alone")
    args = parser.parse_args()
    begun, results, left_out = time.monotonic(), [], []
    if args.tiny:
        args.seq_len, args.steps, args.shapes = 64, 1, args.shapes[:1]
    torch.set_float32_matmul_precision("high")
    with world(600) as place:
        name = torch.cuda.get_device_name(place.device) if cuda else "cpu"
        known = find_device(name)
        top = ceiling(place.device, 256 if args.tiny else 8192)
        peak = f"{known.bf16_flops / 1e12:g} TFLOP/s" if known else "unknown, so no MFU"
        print(f"{name}, torch {torch.__version__} | peak {peak} | matrix products reach {top:.0f} TFLOP/s")
        print(
            f"{'shape':11} | side       | kernel | how      | recompute | layers | tokens/s | TFLOP/s causal, full |",
            end="",
        )
        print(" MFU causal, full | of products | peak GiB")
        room = torch.cuda.get_device_properties(place.device).total_memory * 0.93 if cuda else 0.0
        fitting = {s: None if args.tiny else layers_that_fit(s, args.seq_len, room) for s in args.shapes}
        for row in rows_of(args):
            if time.monotonic() - begun > args.seconds:
                left_out.append(str(row))
                continue
            try:
                cfg = config(row, fitting[row.shape], args.seq_len, tiny=args.tiny)
                found = measure(row, cfg, place, args.steps)
            except (torch.OutOfMemoryError, ConfigError) as e:
                print(f"{row} | {str(e).splitlines()[0][:90]}", flush=True)
                continue
            finally:
                gc.collect()
                torch._dynamo.reset()
                if cuda:
                    torch.cuda.empty_cache()
            for key in ("causal", "full"):
                found[f"mfu_{key}"] = found[f"tflops_{key}"] * 1e12 / known.bf16_flops if known else None
            results.append(row._asdict() | found)
            print(f"{row} | {numbers(found, top)}", flush=True)
        for row_name in left_out:
            print(f"{row_name} | left out for time")
    print(json.dumps({"device": name, "torch": torch.__version__, "products_tflops": top, "rows": results}))


if __name__ == "__main__":
    main()
