"""Which layout of so many GPUs is fastest: every sensible one is planned, those that fit are ranked.

Varies how ranks are cut, the micro-batch and recomputation, never the maths of the run: the global batch, the
model and the data stay. Never loads torch.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from pretrain.config import Config
from pretrain.config_file import parse_config
from pretrain.errors import ConfigError
from pretrain.plan.memory import GIB, fits, memory
from pretrain.plan.report import Assumptions, job_from_config, performance

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_RECOMPUTE = ("none", "selective", "full")


def search(cfg: Config, gpus: int, assumptions: Assumptions, *, top: int = 10) -> tuple[list[dict[str, Any]], int]:
    """(the fastest layouts that fit, each with the `overrides` that make it; how many were tried).

    ConfigError when none fits, with the least memory that any of them needs.
    """
    found, tried, least = [], 0, float("inf")
    for overrides in _layouts(cfg, gpus):
        try:
            candidate = _with(cfg, overrides)
            job = job_from_config(candidate, gpus, assumptions)
        except ConfigError:
            continue  # does not divide, or this version cannot run it
        tried += 1
        least = min(least, memory(job).peak)
        if fits(job):
            text = [f"{table}.{key}={value}" for (table, key), value in overrides.items()]
            found.append({"overrides": text} | performance(job))
    if not tried:
        raise ConfigError(
            f"no layout of {gpus} GPUs divides train.global_batch_size={cfg.train.global_batch_size}; "
            f"choose --gpus that divides it"
        )
    if not found:
        raise ConfigError(
            f"none of {tried} layouts fits {gpus} x {assumptions.device.name} "
            f"({assumptions.device.memory_bytes / GIB:.0f} GiB): the smallest needs {least / GIB:.1f} GiB a rank; "
            f"take more GPUs"
        )
    found.sort(key=lambda plan: -plan["tokens_per_second_per_gpu"])
    return found[:top], tried


def _layouts(cfg: Config, gpus: int) -> Iterator[dict[tuple[str, str], Any]]:
    model = cfg.model
    zero = cfg.parallel.engine == "zero"
    tensor = [
        tp
        for tp in (1, 2, 4, 8)
        if gpus % (tp * cfg.parallel.cp) == 0 and model.n_kv_heads % tp == 0 and model.d_ff % tp == 0
    ]
    for tp, micro_batch, recompute in itertools.product(tensor, _MICRO_BATCHES, _RECOMPUTE):
        ranks = gpus // (tp * cfg.parallel.cp)
        common = {
            ("train", "micro_batch_size"): micro_batch,
            ("activation_checkpoint", "mode"): recompute,
        }
        if zero:
            if tp == 1:
                yield common
            continue
        for shard in _shards(ranks):
            yield {
                ("parallel", "dp_replicate"): ranks // shard,
                ("parallel", "dp_shard"): shard,
                ("parallel", "tp"): tp,
            } | common


def _shards(ranks: int) -> list[int]:
    """Whole world, one node, and the doublings between."""
    return [shard for shard in (2**i for i in range(20)) if ranks % shard == 0 and shard >= min(8, ranks)] or [ranks]


def _with(cfg: Config, overrides: dict[tuple[str, str], Any]) -> Config:
    raw = cfg.model_dump(exclude_unset=True, by_alias=True)
    for (table, key), value in overrides.items():
        raw.setdefault(table, {})[key] = value
    if overrides[("activation_checkpoint", "mode")] != "full":
        raw["activation_checkpoint"].pop("every", None)
    return parse_config(raw)
