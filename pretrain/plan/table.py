"""The plan as a short aligned table that a person reads. Formats what `report` and `search` made, computes nothing."""

from typing import Any

from pretrain.metrics.console import duration
from pretrain.plan.memory import USABLE

_LABEL = 22


def render(plan: dict[str, Any], name: str) -> str:
    """The whole plan of a run; every number beside its convention."""
    counts, block = plan["parameters"], plan["parameters_per_block"]
    per_token, mfu, use = plan["flops_per_token"], plan["mfu"], plan["memory_gib"]
    layout = plan["layout"]
    cut = " x ".join(
        f"{axis} {layout[axis]}"
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        if layout[axis] > 1 or axis == "dp_shard"
    )
    lines = [
        name,
        "",
        _line("parameters", f"{counts['total']:,}", f"{counts['matmul']:,} multiply activations (matmul parameters)"),
        _line("  embedding, head", f"{counts['embedding']:,}", _head(counts)),
        _line(
            "  each block",
            f"{block['total']:,}",
            f"attention {block['attention']:,} + mlp {block['mlp']:,} + norms {block['norms']:,}",
        ),
        _line(
            "train FLOPs / token",
            f"{per_token['full'] / 1e9:,.2f} G",
            f"full attention at {plan['seq_len']:,} tokens; causal {per_token['causal'] / 1e9:,.2f} G",
        ),
        _line("prefill", f"{plan['prefill_flops']:.4g} FLOP", f"{plan['context']:,} tokens, full attention"),
        _line(
            "decode a token",
            f"{plan['decode_flops']:.4g} FLOP",
            f"after {plan['context']:,}: blocks {plan['decode_flops_blocks']:.3g}, "
            f"head {plan['decode_flops_head']:.3g}",
        ),
        _line(
            "KV cache",
            f"{plan['kv_cache_bytes_per_token'] / 1024:,g} KiB / token",
            ", ".join(f"{gib:.5g} GiB at {int(length):,}" for length, gib in plan["kv_cache_gib"].items()),
        ),
        "",
        _line(
            "run",
            f"{plan['train_tokens']:.4g} tokens",
            f"{plan['steps']:,} steps, {plan['train_flops']:.3g} FLOP (6 N T)",
        ),
        _line(
            "  at a stated MFU",
            f"{_round(plan['gpu_hours'])} GPU h",
            f"{plan['gpu_hours_mfu']:.1%} of the peak, {plan['tflops_per_gpu']:,.0f} TFLOP/s per GPU",
        ),
        _line(
            "  energy",
            f"{_round(plan['energy_kwh'])} kWh",
            f"{_round(plan['co2e_kg'])} kg CO2e; {plan['power_watts']:g} W a GPU, {plan['grid_kg_per_kwh']:g} kg/kWh",
        ),
        "",
        _line(
            "layout",
            f"{plan['gpus']} x {plan['device']}",
            f"{cut} ({layout['sharding']}), micro-batch {layout['micro_batch_size']} x {layout['accumulation']}, "
            f"recompute {_recompute(layout)}",
        ),
        _line("memory per rank", f"{use['peak']:.1f} GiB", _memory(plan)),
        _line("step", f"{plan['step_seconds']:.3g} s", _parts(plan)),
        _line(
            "throughput",
            f"{plan['tokens_per_second_per_gpu']:,.0f} tok/s/gpu",
            f"MFU {mfu['causal']:.1%} causal, {mfu['full']:.1%} full; limited by {plan['limited_by']}",
        ),
        _line(
            "  whole run",
            duration(plan["predicted_days"] * 86400),
            f"{_round(plan['predicted_gpu_hours'])} GPU h at this throughput",
        ),
    ]
    if not plan["fits"]:
        lines.append(
            f"\nDoes not fit: {use['peak']:.1f} GiB + {plan['outside_allocator_gib']:.0f} GiB outside the allocator "
            f"on a device of {plan['device_gib']:.1f} GiB, {USABLE:.0%} of it usable.\n"
            f"Shard over more GPUs, lower train.micro_batch_size, or recompute more (--search tries these)."
        )
    return "\n".join(lines)


def _recompute(layout: dict[str, Any]) -> str:
    budget = layout["memory_budget"]
    return layout["recompute"] if budget == 1 else f"planned as none, not as memory_budget {budget:g} will have it"


def render_search(found: list[dict[str, Any]], checked: int, device: str, gpus: int) -> str:
    """The best layouts, fastest first, with the overrides that make each."""
    lines = [
        f"{len(found)} fastest of {checked} layouts on {gpus} x {device}",
        "",
        f"{'tok/s/gpu':>9}  {'MFU causal':>10}  {'GiB':>5}  {'step s':>7}  {'limited by':<16}  overrides",
    ]
    for plan in found:
        lines.append(
            f"{plan['tokens_per_second_per_gpu']:>9,.0f}  {plan['mfu']['causal']:>10.1%}  "
            f"{plan['memory_gib']['peak']:>5.1f}  {plan['step_seconds']:>7.2f}  {plan['limited_by']:<16}  "
            + " ".join(plan["overrides"])
        )
    return "\n".join(lines)


def _line(label: str, value: str, note: str) -> str:
    return f"{label:<{_LABEL}} {value:>18}   {note}".rstrip()


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _head(counts: dict[str, int]) -> str:
    return f"{counts['head']:,}" if counts["head"] else "the head is the embedding (tied)"


def _memory(plan: dict[str, Any]) -> str:
    use = plan["memory_gib"]
    names = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "overhead")
    return " + ".join(f"{name} {use[name]:.1f}" for name in names if use[name] >= 0.05)


def _parts(plan: dict[str, Any]) -> str:
    total = plan["step_seconds"]
    parts = sorted(plan["step_parts"].items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {s / total:.0%}" for name, s in parts if s >= 0.005 * total)
