"""`pretrain plan`: parse, call, print. Never loads torch but for --trace, so that a login node answers at once."""

import argparse
from collections.abc import Callable
from typing import Any

from pretrain.config import Config


def add_parser(subparsers: Any, trace: Callable[[Config, int, bool], str] | None = None) -> None:
    """`trace` (config, ranks, whether as JSON) is what --trace runs; it lives above this floor, and loads torch."""
    parser = subparsers.add_parser(
        "plan",
        help="parameters, FLOPs, memory, time, energy of a run before it starts",
        description="What a config costs: counts are exact, memory and time are predicted (benchmarks/planner.py "
        "prints how well). Never loads torch, but for --trace.",
    )
    parser.add_argument("config", help="a TOML config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--gpus", type=_count, help="ranks (default: what the config fixes, or a node of 8)")
    parser.add_argument(
        "--device", default="h100-sxm", help="h100-sxm, h200-sxm, a100-sxm, b200, ... (default: %(default)s)"
    )
    parser.add_argument(
        "--fabric",
        choices=("infiniband", "efa"),
        default="infiniband",
        help="network between nodes (default: %(default)s)",
    )
    parser.add_argument(
        "--mfu", type=_share, default=0.40, help="6 N T over the bf16 peak, for gpu_hours (default: %(default)s)"
    )
    parser.add_argument("--gpu-hours", type=_positive, help="state the hours instead of an MFU")
    parser.add_argument("--power-watts", type=_positive, help="per GPU (default: the board's)")
    parser.add_argument("--grid-kg-per-kwh", type=_positive, default=None, help="kg CO2e per kWh (default: 0.43)")
    parser.add_argument(
        "--context", type=_count, help="tokens for prefill, decode and the KV cache (default: data.seq_len)"
    )
    parser.add_argument("--search", action="store_true", help="rank the layouts that fit by predicted tokens/s")
    parser.add_argument("--top", type=_count, default=10, help="layouts that --search shows (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    if trace is not None:
        about = "build the real model on a fake world of --gpus ranks, trace one step and count a rank's bytes"
        parser.add_argument("--trace", action="store_const", const=trace, help=about)
    parser.set_defaults(run=run, trace=None)


def run(args: argparse.Namespace) -> int:
    from pretrain.config_file import load_config
    from pretrain.metrics import energy
    from pretrain.metrics.hardware import device_named
    from pretrain.metrics.jsonl import encode
    from pretrain.plan.report import Assumptions, default_gpus, plan
    from pretrain.plan.search import search
    from pretrain.plan.table import render, render_search

    assumptions = Assumptions(
        device=device_named(args.device),
        fabric=args.fabric,
        mfu=args.mfu,
        gpu_hours=args.gpu_hours,
        power_watts=args.power_watts,
        grid_kg_per_kwh=args.grid_kg_per_kwh or energy.DEFAULT_GRID_KG_PER_KWH,
        context=args.context,
    )
    cfg = load_config(args.config, args.overrides)
    gpus = args.gpus or default_gpus(cfg)
    if args.trace is not None:
        print(args.trace(cfg, gpus, args.json))
        return 0
    if args.search:
        found, tried = search(cfg, gpus, assumptions, top=args.top)
        result = {"device": assumptions.device.name, "gpus": gpus, "tried": tried, "layouts": found}
        print(encode(result) if args.json else render_search(found, tried, assumptions.device.name, gpus))
        return 0
    result = plan(cfg, gpus, assumptions)
    print(encode(result) if args.json else render(result, cfg.run.name))
    return 0


def _count(text: str) -> int:
    value = float(text.replace("_", ""))
    if not 1 <= value < 1e18 or value != int(value):
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is wanted, not {text!r}")
    return int(value)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 is wanted, not {text!r}")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"a share between 0 and 1 is wanted, not {text!r}")
    return value
