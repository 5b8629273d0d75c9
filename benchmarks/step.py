"""One training step of our model beside that of `transformers`' Llama, and beside the floor, on this machine.

    python benchmarks/step.py                                        everything; about 8 minutes on 2 quiet cores
    python benchmarks/step.py --modes fp32/eager bf16/eager --rounds 9 --no-memory
    python benchmarks/step.py --threads 1 --clock cpu                on a machine that others use at the same time

A step is forward, loss, backward, clipping by the global norm and fused AdamW. Both sides start from the same weights,
carried over by `pretrain.model.hf`, read the same tokens, and must give the same loss. The floor is the step's matrix
products (forward, by input, by weight) and its attention, bare: no norm, no loss, no optimizer.

Speed: the sides take turns in one process, so that a machine that drifts drifts for all; a ratio is the median over
rounds of the ratio within a round. Memory: each side alone in its own process, the highest resident set of three steps
above what the process held after its imports.

Precisions: `fp32`; `bf16`, weights and everything else on both sides; `mixed`, fp32 weights with bf16 compute as each
side's users run it: our FSDP2 engine on one rank, torch.autocast around theirs. Compiled: our blocks one by one
(`compile_blocks`), their model as a whole (`torch.compile(model)`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pretrain.config_file import parse_config
from pretrain.config_tables import ModelConfig
from pretrain.data.loader import Batch
from pretrain.dist import world
from pretrain.model.hf import hf_name, to_hf, to_hf_config
from pretrain.model.init import init_weights
from pretrain.model.llama import Llama
from pretrain.parallel.build import build_engine
from pretrain.parallel.compile import compile_blocks

CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
MODES = ("fp32/eager", "bf16/eager", "mixed/eager", "fp32/compiled", "bf16/compiled")
MEMORY_MODES = ("fp32/eager", "bf16/eager")
GIB = 1 << 30


class Shape(NamedTuple):
    model: ModelConfig
    batch: int
    seq_len: int
    chunks: int  # of the loss


Step = Callable[[Batch], Tensor | None]  # one update; the mean loss before it
Weights = dict[str, Tensor] | None  # ours, by name; None: any


def ours(shape: Shape, precision: str, weights: Weights, *, compiled: bool) -> Step:
    if precision == "mixed":
        return _our_engine(shape, weights, compiled=compiled)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = Llama(shape.model, activations=dtype, loss_chunks=shape.chunks)
    if weights is not None:
        model.load_state_dict(weights)
    model.to(dtype)
    if compiled:
        compile_blocks(model)

    def loss(batch: Batch) -> Tensor:
        total: Tensor = model(batch.inputs, positions=batch.positions, labels=batch.labels).total
        return total / batch.labels.numel()

    return _update(model, loss)


def _our_engine(shape: Shape, weights: Weights, *, compiled: bool) -> Step:
    cfg = parse_config(
        {
            "run": {"name": "step", "dir": "step"},
            "model": shape.model.model_dump(exclude_none=True),
            "data": {"sources": [{"path": "none"}], "seq_len": shape.seq_len, "mask_documents": False},
            "train": {"steps": 1, "global_batch_size": shape.batch, "micro_batch_size": shape.batch, "grad_clip": CLIP},
            "optimizer": {"lr": ADAMW["lr"]},
            "schedule": {"warmup_steps": 0},
            "loss": {"chunks": shape.chunks},
            "compile": {"enabled": compiled},
        }
    )
    place = world(600).__enter__()  # of one rank, for the life of this process
    engine = build_engine(cfg, cfg.layout(1), place, lambda model: torch.optim.AdamW(model.parameters(), **ADAMW))
    if weights is not None:
        with torch.no_grad():
            for name, param in engine.model.named_parameters():
                param.to_local().copy_(weights[name])  # type: ignore[attr-defined]

    def step(batch: Batch) -> Tensor:
        loss = engine.forward(batch).total / batch.labels.numel()
        engine.backward(loss, last=True)
        engine.step(ADAMW["lr"])
        return loss.detach()

    return step


def theirs(shape: Shape, precision: str, weights: Weights, *, compiled: bool) -> Step:
    config = to_hf_config(shape.model) | {"use_cache": False, "attn_implementation": "sdpa"}
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    if weights is not None:
        model.load_state_dict({hf_name(name): to_hf(name, value, shape.model) for name, value in weights.items()})
    if precision == "bf16":
        model.to(torch.bfloat16)
    run = torch.compile(model) if compiled else model

    def loss(batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "mixed"):
            # shift_labels: the labels are the next tokens already.
            mean: Tensor = run(input_ids=batch.inputs, labels=batch.labels, shift_labels=batch.labels).loss
        return mean

    return _update(model, loss)


def _update(model: nn.Module, loss_of: Callable[[Batch], Tensor]) -> Step:
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, **ADAMW)

    def step(batch: Batch) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def floor(shape: Shape, precision: str) -> Step:
    """The matrix products and the attention of a step, on random numbers, products into tensors made before."""
    model, tokens = shape.model, shape.batch * shape.seq_len
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    d, h, k, q, f = model.d_model, model.n_heads, model.n_kv_heads, model.head_dim, model.d_ff
    layer = [(d, h * q), (d, k * q), (d, k * q), (h * q, d), (d, f), (d, f), (f, d)]
    linears = layer * model.n_layers + [(d, model.vocab_size)]
    weights = {pair: torch.randn(pair[1], pair[0], dtype=dtype) for pair in set(linears)}
    values = {n: torch.randn(tokens, n, dtype=dtype) for pair in set(linears) for n in pair}
    wide = {n: torch.empty_like(value) for n, value in values.items()}
    gradients = {pair: torch.empty_like(weight) for pair, weight in weights.items()}
    query, key, value = (
        torch.randn(shape.batch, shape.seq_len, n, q, dtype=dtype).transpose(1, 2).requires_grad_() for n in (h, k, k)
    )
    grad = torch.randn(shape.batch, shape.seq_len, h, q, dtype=dtype).transpose(1, 2)

    def step(batch: Batch) -> None:
        for pair in linears:
            x, weight, dy = values[pair[0]], weights[pair], values[pair[1]]
            torch.mm(x, weight.t(), out=wide[pair[1]])
            torch.mm(dy, weight, out=wide[pair[0]])
            torch.mm(dy.t(), x, out=gradients[pair])
        for _ in range(model.n_layers):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=h != k)
            torch.autograd.grad(out, (query, key, value), grad)

    return step


def batches(shape: Shape, count: int) -> list[Batch]:
    """Random tokens, one document a row."""
    generator = torch.Generator().manual_seed(0)
    b, t = shape.batch, shape.seq_len
    out = []
    for _ in range(count):
        tokens = torch.randint(shape.model.vocab_size, (b, t + 1), generator=generator)
        positions = torch.arange(t, dtype=torch.int32).repeat(b, 1)
        ends = torch.arange(0, b * t + 1, t, dtype=torch.int32)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        out.append(Batch(inputs, labels, positions, torch.zeros_like(positions), ends, t))
    return out


def make(side: str, shape: Shape, mode: str, weights: Weights = None) -> Step:
    precision, how = mode.split("/")
    if side == "floor":
        return floor(shape, precision)
    return {"ours": ours, "transformers": theirs}[side](shape, precision, weights, compiled=how == "compiled")


def compare(shape: Shape, mode: str, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of a step of each side, which take turns, and the ratios within the rounds: medians."""
    model = Llama(shape.model)
    init_weights(model, 0, shape.model.n_layers)
    weights = model.state_dict()
    steps = {side: make(side, shape, mode, weights) for side in ("ours", "transformers", "floor")}
    del model, weights
    first, warm, *rest = batches(shape, rounds + 2)
    losses = {side: step(first) for side, step in steps.items()}
    tolerance = 1e-5 if mode.startswith("fp32") else 5e-3
    torch.testing.assert_close(losses["ours"], losses["transformers"], rtol=tolerance, atol=0.0, check_dtype=False)
    for step in steps.values():
        step(warm)
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    sides = list(steps)
    for turn, batch in enumerate(rest):
        for side in sides[turn % 3 :] + sides[: turn % 3]:
            start = clock()
            steps[side](batch)
            seconds[side].append(clock() - start)

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(seconds[a], seconds[b], strict=True))

    return {
        "ours_seconds": statistics.median(seconds["ours"]),
        "transformers_seconds": statistics.median(seconds["transformers"]),
        "floor_seconds": statistics.median(seconds["floor"]),
        "speed_ratio": ratio("transformers", "ours"),
        "ours_over_floor": ratio("ours", "floor"),
        "transformers_over_floor": ratio("transformers", "floor"),
    }


def peak_bytes(side: str, shape: Shape, mode: str) -> int:
    """Highest resident set of this process over three steps, above what it holds now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the imports' own peak
    before = _resident("VmRSS")
    step = make(side, shape, mode)
    for batch in batches(shape, 3):
        step(batch)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory(args: argparse.Namespace, mode: str, vocab: int) -> dict[str, float]:
    peaks = {}
    for side in ("ours", "transformers"):
        sizes = _size_arguments(args) | {"vocab": vocab, "batch": args.memory_batch}
        command = [sys.executable, __file__, "--peak-of", side, "--modes", mode]
        command += [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        peaks[side] = int(done.stdout.split()[-1])
    return {
        "ours_peak_gib": peaks["ours"] / GIB,
        "transformers_peak_gib": peaks["transformers"] / GIB,
        "memory_ratio": peaks["ours"] / peaks["transformers"],
    }


SIZES = {
    "vocab": 32_000,
    "d_model": 512,
    "layers": 8,
    "heads": 8,
    "kv_heads": 4,
    "d_ff": 1536,
    "seq_len": 512,
    "batch": 4,
    "chunks": 8,
    "threads": os.cpu_count() or 1,
}


def _size_arguments(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in SIZES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--modes", nargs="+", default=list(MODES), help="precision/eager or precision/compiled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: time on a core, with --threads 1"
    )
    parser.add_argument("--large-vocab", type=int, default=128_256, help="memory is measured at this vocabulary too")
    parser.add_argument("--memory-batch", type=int, default=8)
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak-of", choices=("ours", "transformers"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads > 1:
        parser.error("--clock cpu adds up all threads, waiting ones too; give --threads 1 with it")
    torch.set_num_threads(args.threads)
    model = ModelConfig(
        vocab_size=args.vocab,
        d_model=args.d_model,
        n_layers=args.layers,
        n_heads=args.heads,
        n_kv_heads=args.kv_heads,
        d_ff=args.d_ff,
        max_seq_len=args.seq_len,
    )  # type: ignore[call-arg]
    shape = Shape(model, args.batch, args.seq_len, args.chunks)
    if args.peak_of:
        print(peak_bytes(args.peak_of, shape, args.modes[0]))
        return
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    results: dict[str, Any] = {"sizes": _size_arguments(args), "clock": args.clock, "memory_batch": args.memory_batch}
    results |= {"torch": torch.__version__, "transformers": transformers.__version__, "speed": {}, "memory": {}}
    if not args.no_speed:
        print("step           | tok/s ours | transformers | ratio | ours / floor | transformers / floor", flush=True)
        for mode in args.modes:
            row = results["speed"][mode] = compare(shape, mode, args.rounds, clock)
            tokens = args.batch * args.seq_len
            print(
                f"{mode:14} | {tokens / row['ours_seconds']:10,.0f} | {tokens / row['transformers_seconds']:12,.0f} "
                f"| {row['speed_ratio']:5.2f} | {row['ours_over_floor']:12.3f} | {row['transformers_over_floor']:.3f}",
                flush=True,
            )
    if not args.no_memory:
        print("\npeak GiB   | vocabulary |  ours | transformers | ratio", flush=True)
        for vocab in (args.vocab, args.large_vocab):
            for mode in [mode for mode in MEMORY_MODES if mode in args.modes]:
                row = results["memory"][f"{mode}/{vocab}"] = memory(args, mode, vocab)
                print(
                    f"{mode:10} | {vocab:10,} | {row['ours_peak_gib']:5.2f} | {row['transformers_peak_gib']:12.2f} "
                    f"| {row['memory_ratio']:.2f}",
                    flush=True,
                )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
