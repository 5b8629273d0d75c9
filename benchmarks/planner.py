"""The planner against published throughput and memory: ratios predicted / published, row by row, and the fit.

    python benchmarks/planner.py [--ultrascale RUNS.csv]          the table
    python benchmarks/planner.py --ultrascale RUNS.csv --fit      fit the constants of pretrain.plan.time anew, and
                                                                  the errors of rows that each fit did not see

Sources: torchtitan (benchmarks/llama3_h100_202412_torchtitan.md, asyncTP_llama3_h100_2025-06, and its older A100
page), Megatron-Core r0.8.0's README, and the finished runs of the Ultra-Scale Playbook (nanotron), a CSV with
columns model, nodes, dp, tp, pp, mbs, ga, gbs, zero, mfu, tok, mem. A framework enters by its habits (`Software`),
never by a factor of its own or a row's.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pretrain.config import ModelConfig
from pretrain.metrics.flops import flops_per_token
from pretrain.metrics.hardware import device_named
from pretrain.plan.job import Job, Software
from pretrain.plan.memory import GIB, memory
from pretrain.plan.time import RATES, Rates, tokens_per_second_per_gpu

_TITAN: dict[str, Any] = {"saved_matmuls": 0.5, "tables_together": True, "head_gradient": False}
TITAN_EAGER = Software(fused=False, **_TITAN)
TITAN_COMPILED = Software(**_TITAN)
# Overlaps gradients, weights and tensor-parallel traffic; cuDNN attention on Hopper.
MEGATRON = Software(attention_speed=1.5, tp_overlap=0.8, fp32_gradients=True, master_copy=True, head_gradient=False)
# Python issues one block in 4.4 ms: its smallest runs take 70 ms a micro-batch for 16 blocks, 142 ms for 32.
NANOTRON = Software(
    fused=False,
    host_layer_seconds=4.4e-3,
    dp_overlap=0.0,
    fp32_gradients=True,
    master_copy=True,
    head_gradient=False,
)


@dataclass(frozen=True)
class Row:
    name: str
    group: str
    job: Job
    tokens_per_second: float  # per GPU
    gib: float | None


def torchtitan_rows() -> list[Row]:
    h100, a100 = device_named("h100-sxm-96gb"), device_named("a100-sxm")

    def row(name: str, preset: str, tokens: float, gib: float | None, seq_len: int = 8192, **layout: Any) -> Row:
        model = ModelConfig.model_validate({"preset": preset})
        settings: dict[str, Any] = {"device": h100, "loss_chunks": 1, "software": TITAN_COMPILED} | layout
        if settings.get("compute") == "fp8":
            settings["gather_bytes"] = 1
        return Row(name, "torchtitan", Job(model=model, seq_len=seq_len, **settings), tokens, gib)

    small, large = "llama3.1_8b", "llama3.1_70b"
    eager: dict[str, Any] = {"software": TITAN_EAGER}
    fp8: dict[str, Any] = {"compute": "fp8"}
    large_layout: dict[str, Any] = {"dp_shard": 32, "tp": 8, "micro_batch": 16, "recompute": "full"}
    return [
        row("8B, 8 GPUs, eager", small, 5762, 82.4, dp_shard=8, micro_batch=2, **eager),
        row("8B, 8 GPUs, compile", small, 6667, 77.0, dp_shard=8, micro_batch=2),
        row("8B, 8 GPUs, fp8", small, 8532, 76.8, dp_shard=8, micro_batch=2, **fp8),
        row("8B, 128 GPUs, eager", small, 5605, 67.0, dp_shard=128, micro_batch=2, **eager),
        row("8B, 128 GPUs, compile", small, 6514, 62.0, dp_shard=128, micro_batch=2),
        row("8B, FSDP 8 TP 8", small, 4378, None, dp_shard=8, tp=8, micro_batch=12),
        row("70B, FSDP 32 TP 8", large, 597, None, **large_layout),
        row("70B, FSDP 32 TP 8, fp8", large, 829, 71.9, **large_layout, **fp8),
        row("8B at 32k, fp8", small, 3890, 83.9, 32_768, dp_shard=8, recompute="full", **fp8),
        row("8B at 131k, CP 4, fp8", small, 1071, 84.0, 131_072, dp_shard=2, cp=4, recompute="full", **fp8),
        row("8B, 64 A100", small, 2973, None, dp_shard=64, device=a100, **eager),
        row("13B, 64 A100", "llama2_13b", 2162, None, 4096, dp_shard=64, micro_batch=2, recompute="none",
            device=a100, **eager),
    ]  # fmt: skip


def megatron_rows() -> list[Row]:
    h100, rows = device_named("h100-sxm"), []
    for name, d, layers, heads, tp, pp, gpus, batch, tflops in [
        ("1.7B", 2048, 24, 16, 1, 1, 48, 192, 408.8),
        ("7.1B", 4096, 30, 32, 2, 1, 96, 192, 465.9),
        ("16B", 6144, 32, 48, 4, 1, 192, 192, 489.1),
        ("70B", 8192, 84, 64, 8, 2, 768, 384, 419.7),
    ]:
        # Two matrices of 4 d, counted as three of 8/3 d: the same parameters and FLOPs.
        d_ff = round(8 * d / 3 / tp) * tp
        model = SimpleNamespace(
            vocab_size=131_072, d_model=d, n_layers=layers, n_heads=heads, n_kv_heads=heads,
            head_dim=d // heads, d_ff=d_ff, tie_embeddings=False,
        )  # fmt: skip
        dp = gpus // tp // pp
        job = Job(
            model=model, seq_len=4096, device=h100, accumulation=batch // dp, dp_shard=dp, tp=tp, pp=pp,
            sharding="zero1", recompute="none", loss_chunks=1, software=MEGATRON,
        )  # fmt: skip
        tokens = tflops * 1e12 / flops_per_token(model, 4096, causal=False)
        rows.append(Row(f"{name}, TP {tp} PP {pp}, {gpus} GPUs", "Megatron", job, tokens, None))
    return rows


def ultrascale_rows(path: Path) -> list[Row]:
    sizes: dict[str, dict[str, Any]] = {
        "1.34B": {"d_model": 2048, "n_layers": 16, "n_heads": 16, "d_ff": 8192, "tie_embeddings": True},
        "8.86B": {"d_model": 4096, "n_layers": 32, "n_heads": 32, "d_ff": 14336, "tie_embeddings": False},
    }
    rows = []
    for line in csv.DictReader(path.read_text().splitlines()):
        size = sizes[line["model"]]
        model = SimpleNamespace(vocab_size=131_072, head_dim=128, n_kv_heads=size["n_heads"], **size)
        dp, tp, pp, zero = (int(line[key]) for key in ("dp", "tp", "pp", "zero"))
        job = Job(
            model=model, seq_len=4096, device=device_named("h100-sxm"), micro_batch=int(line["mbs"]),
            accumulation=int(line["ga"]), dp_shard=dp, tp=tp, pp=pp, sharding="zero0" if zero == 0 else "zero1",
            recompute="none", loss_chunks=1, fabric="efa", software=NANOTRON,
        )  # fmt: skip
        tokens, gib = float(line["tok"]), float(line["mem"])
        name = f"{line['model']} dp{dp} tp{tp} pp{pp} mbs{line['mbs']} zero{zero}"
        rows.append(Row(name, _ultrascale_group(job), job, tokens, gib))
    return rows


def _ultrascale_group(job: Job) -> str:
    if job.pp > 1:
        return "nanotron, pipeline in one node" if job.gpus <= 8 else "nanotron, pipeline over nodes"
    return "nanotron, TP within a node" if job.tp <= 8 else "nanotron, TP over nodes"


def in_fit(row: Row) -> bool:
    """Rows the constants are fitted to. Pipelines and tensor parallelism over nodes are left out: the published
    runs fall up to thirty times below others of the same shape there, with the number of collectives and not with
    bytes or FLOPs, so that the fit would learn a fault of the runs."""
    return not row.group.startswith("nanotron") or row.group == "nanotron, TP within a node"


def log_ratio(row: Row, rates: Rates = RATES) -> float:
    return math.log(tokens_per_second_per_gpu(row.job, rates) / row.tokens_per_second)


# Fitted within what is physically possible: (lowest, highest) of each constant.
_BOUNDS = {
    "matmul": (0.6, 1.0),
    "power_exponent": (0.3, 1.5),
    "attention": (0.2, 0.9),
    "memory": (0.4, 0.9),
    "eager": (1.0, 4.0),
    "kernel_seconds": (1e-6, 2e-5),
    "link_share": (0.5, 0.9),
    "card_share": (0.5, 0.95),
    "context_loss": (0.0, 1.0),
    "contention": (0.01, 0.5),
    "fp8": (0.5, 1.0),
}


def fit(rows: Sequence[Row]) -> Rates:
    """Least squares on the log ratio, Huber-like; each source weighs as much as it has rows, nanotron as 60."""
    import numpy as np
    from scipy.optimize import least_squares

    names = list(_BOUNDS)
    low, high = (np.array([_BOUNDS[name][i] for name in names]) for i in (0, 1))
    many = max(1, sum(row.group.startswith("nanotron") for row in rows))
    weights = np.array([math.sqrt(60 / many) if row.group.startswith("nanotron") else 2.0 for row in rows])

    def rates_at(x: Any) -> Rates:
        values = low + x * (high - low)
        return Rates(**dict(zip(names, map(float, values), strict=True)), hop_seconds=RATES.hop_seconds)

    def residuals(x: Any) -> Any:
        rates = rates_at(x)
        return weights * np.array([log_ratio(row, rates) for row in rows])

    start = np.array([0.5] * len(names))
    solution = least_squares(residuals, start, bounds=(0, 1), loss="soft_l1", f_scale=0.15)
    return rates_at(solution.x)


def held_out(rows: Sequence[Row], folds: int = 5) -> dict[str, list[float]]:
    """Log ratios of every row by the constants fitted without its fold, by group."""
    errors: dict[str, list[float]] = {}
    fitted = [row for row in rows if in_fit(row)]
    for fold in range(folds):
        rates = fit([row for i, row in enumerate(fitted) if i % folds != fold])
        for i, row in enumerate(fitted):
            if i % folds == fold:
                errors.setdefault(row.group, []).append(log_ratio(row, rates))
    return errors


def summary(errors: dict[str, list[float]]) -> str:
    lines = [f"{'group':32} {'rows':>5} {'median ratio':>13} {'median error':>13} {'90% within':>11}"]
    for group, values in errors.items():
        off = sorted(abs(math.expm1(value)) for value in values)
        lines.append(
            f"{group:32} {len(values):>5} {math.exp(statistics.median(values)):>13.2f} "
            f"{statistics.median(off):>13.1%} {off[min(len(off) - 1, int(0.9 * len(off)))]:>11.1%}"
        )
    return "\n".join(lines)


def by_group(rows: Sequence[Row], measure: Callable[[Row], float]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(measure(row))
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ultrascale", type=Path, help="CSV of the Ultra-Scale Playbook's runs")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew and cross-validate")
    args = parser.parse_args()

    rows = torchtitan_rows() + megatron_rows()
    print(f"{'row':32} {'tokens/s':>9} {'planned':>9} {'ratio':>6}   {'GiB':>5} {'planned':>8} {'ratio':>6}")
    for row in rows:
        planned, peak = tokens_per_second_per_gpu(row.job), memory(row.job).peak / GIB
        gib = f"{row.gib:5.1f} {peak:8.1f} {peak / row.gib:6.2f}" if row.gib else ""
        ratio = planned / row.tokens_per_second
        print(f"{row.name:32} {row.tokens_per_second:9,.0f} {planned:9,.0f} {ratio:6.2f}   {gib}")
    if args.ultrascale:
        rows += ultrascale_rows(args.ultrascale)
    print("\ntokens/s, planned over published\n" + summary(by_group(rows, log_ratio)))
    with_memory = [row for row in rows if row.gib]
    memory_ratio = by_group(with_memory, lambda row: math.log(memory(row.job).peak / GIB / (row.gib or 1)))
    print("\nmemory, planned over published\n" + summary(memory_ratio))
    if args.fit:
        rates = fit([row for row in rows if in_fit(row)])
        print("\nfitted", {field.name: float(f"{getattr(rates, field.name):.3g}") for field in fields(rates)})
        print("\ntokens/s of rows left out of the fit (5 folds)\n" + summary(held_out(rows)))


if __name__ == "__main__":
    main()
