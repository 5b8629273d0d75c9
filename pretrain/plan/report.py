"""The plan of a run as one dictionary, from its config: what `pretrain plan` prints, as a table or as JSON.

Counts come from `metrics.flops`, energy from `metrics.energy`, memory and time from their own files here.
Never loads torch.
"""

from dataclasses import dataclass
from typing import Any

from pretrain.config import Config
from pretrain.errors import ConfigError
from pretrain.metrics import energy, flops
from pretrain.metrics.hardware import Device
from pretrain.plan.job import Fabric, Job, Sharding, Software
from pretrain.plan.memory import CONTEXT_BYTES, GIB, fits, memory, optimizer_state_bytes
from pretrain.plan.time import step_time

_CACHE_LENGTHS = (8_192, 32_768, 128_000)


@dataclass(frozen=True)
class Assumptions:
    """What no config says."""

    device: Device
    fabric: Fabric = "infiniband"
    mfu: float = 0.40  # model FLOPs (6 N T) over the peak, for gpu_hours
    gpu_hours: float | None = None  # stated instead of following from mfu
    power_watts: float | None = None  # per GPU; the device's board power where not stated
    grid_kg_per_kwh: float = energy.DEFAULT_GRID_KG_PER_KWH
    context: int | None = None  # tokens, for prefill and decode; data.seq_len where not stated


def job_from_config(cfg: Config, gpus: int, assumptions: Assumptions) -> Job:
    """The step that `pretrain train` would run on `gpus` ranks; ConfigError where they cannot be cut so."""
    layout = cfg.layout(gpus)
    zero = cfg.parallel.engine == "zero"
    stages: dict[int, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}
    fp32 = cfg.precision.compute == "fp32"
    return Job(
        model=cfg.model,
        seq_len=cfg.data.seq_len,
        device=assumptions.device,
        micro_batch=cfg.train.micro_batch_size,
        accumulation=layout.accumulation,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        cp=layout.cp,
        tp=layout.tp,
        pp=cfg.parallel.pp,
        sharding=stages[cfg.parallel.zero_stage] if zero else "fsdp",
        reshard=cfg.parallel.reshard_after_forward,
        recompute=cfg.activation_checkpoint.mode,
        recompute_every=cfg.activation_checkpoint.every,
        compute=cfg.precision.compute,
        gather_bytes=4 if zero or fp32 else 2,
        reduce_bytes=4 if cfg.precision.reduce == "fp32" else 2,
        local_accumulation=cfg.parallel.accumulate == "local",
        loss_chunks=cfg.loss.chunks,
        fabric=assumptions.fabric,
        software=Software(fused=cfg.compile.enabled),
    )


def default_gpus(cfg: Config) -> int:
    """The smallest world that the config fixes; where it takes what is there, one node or what divides the batch."""
    par = cfg.parallel
    fixed = par.dp_replicate * par.cp * par.tp * par.pp
    if par.dp_shard != -1:
        return fixed * par.dp_shard
    for shard in (8, 4, 2):
        try:
            cfg.layout(fixed * shard)
        except ConfigError:
            continue
        return fixed * shard
    return fixed


def training_tokens(cfg: Config) -> int:
    """Row positions of the whole run: `train.tokens` as stated, or steps x rows x length."""
    if cfg.train.tokens is not None:
        return round(cfg.train.tokens)
    return cfg.steps * cfg.train.global_batch_size * cfg.data.seq_len


def plan(cfg: Config, gpus: int, assumptions: Assumptions) -> dict[str, Any]:
    """Everything `pretrain plan --json` prints; bytes in GiB where the key says so."""
    job = job_from_config(cfg, gpus, assumptions)
    return _counts(cfg, assumptions) | _budget(cfg, assumptions) | _layout(cfg, job) | performance(job)


def performance(job: Job) -> dict[str, Any]:
    """Memory and speed of a layout."""
    use, time, peak = memory(job), step_time(job), job.device.bf16_flops
    per_gpu = job.tokens_per_step / time.total / job.gpus
    per_token = {
        "full": flops.flops_per_token(job.model, job.seq_len, causal=False),
        "causal": flops.flops_per_token(job.model, job.seq_len, causal=True),
    }
    return {
        "memory_gib": {"peak": use.peak / GIB} | {name: size / GIB for name, size in use.parts().items()},
        "device_gib": job.device.memory_bytes / GIB,
        "outside_allocator_gib": CONTEXT_BYTES / GIB,
        "optimizer_state_gib": optimizer_state_bytes(job) / GIB,
        "fits": fits(job),
        "step_seconds": time.total,
        "step_parts": {name: seconds for name, seconds in time.parts().items() if seconds},
        "tokens_per_second": per_gpu * job.gpus,
        "tokens_per_second_per_gpu": per_gpu,
        "mfu": {convention: per_gpu * count / peak for convention, count in per_token.items()},
        "limited_by": time.limited_by,
    }


def _counts(cfg: Config, assumptions: Assumptions) -> dict[str, Any]:
    model, seq_len = cfg.model, cfg.data.seq_len
    counts = flops.parameter_counts(model)
    context = assumptions.context or seq_len
    layers = model.n_layers
    block = {
        "attention": counts.attention // layers,
        "mlp": counts.mlp // layers,
        "norms": 2 * model.d_model,
    }
    lengths = sorted({context, *_CACHE_LENGTHS})
    return {
        "parameters": counts.as_dict(),
        "parameters_per_block": block | {"total": sum(block.values())},
        "seq_len": seq_len,
        "flops_per_token": {
            "full": flops.flops_per_token(model, seq_len, causal=False),
            "causal": flops.flops_per_token(model, seq_len, causal=True),
        },
        "context": context,
        "prefill_flops": flops.prefill_flops(model, context),
        "prefill_flops_blocks": flops.block_forward_flops(model, context, context),
        "decode_flops": flops.decode_flops(model, context),
        "decode_flops_blocks": flops.block_forward_flops(model, 1, context),
        "decode_flops_head": flops.head_forward_flops(model, 1),
        "kv_cache_bytes_per_token": flops.kv_cache_bytes(model, 1),
        "kv_cache_gib": {str(n): flops.kv_cache_bytes(model, n) / GIB for n in lengths},
    }


def _budget(cfg: Config, assumptions: Assumptions) -> dict[str, Any]:
    """FLOPs, hours, energy and carbon of the whole run. Model FLOPs here are 6 x parameters x tokens."""
    tokens, device = training_tokens(cfg), assumptions.device
    train_flops = 6 * flops.parameter_counts(cfg.model).total * tokens
    hours = assumptions.gpu_hours
    if hours is None:
        hours = energy.gpu_hours(train_flops, mfu=assumptions.mfu, peak_flops=device.bf16_flops)
    watts = device.watts if assumptions.power_watts is None else assumptions.power_watts
    kwh = energy.energy_kwh(hours, watts=watts)
    average = train_flops / (hours * 3600)
    return {
        "train_tokens": tokens,
        "train_flops": train_flops,
        "train_flops_convention": "6 x parameters x tokens",
        "train_flops_by": {
            name: tokens * flops.flops_per_token(cfg.model, cfg.data.seq_len, causal=name == "causal")
            for name in ("full", "causal")
        },
        "gpu_hours": hours,
        "gpu_hours_mfu": average / device.bf16_flops,
        "tflops_per_gpu": average / 1e12,
        "power_watts": watts,
        "energy_kwh": kwh,
        "grid_kg_per_kwh": assumptions.grid_kg_per_kwh,
        "co2e_kg": energy.co2e_kg(kwh, grid_kg_per_kwh=assumptions.grid_kg_per_kwh),
    }


def _layout(cfg: Config, job: Job) -> dict[str, Any]:
    steps = cfg.steps
    seconds = steps * step_time(job).total
    return {
        "device": job.device.name,
        "gpus": job.gpus,
        "layout": {
            "sharding": job.sharding,
            "dp_replicate": job.dp_replicate,
            "dp_shard": job.dp_shard,
            "cp": job.cp,
            "tp": job.tp,
            "pp": job.pp,
            "micro_batch_size": job.micro_batch,
            "accumulation": job.accumulation,
            "recompute": job.recompute,
            "memory_budget": cfg.activation_checkpoint.memory_budget,
        },
        "steps": steps,
        "predicted_days": seconds / 86400,
        "predicted_gpu_hours": seconds / 3600 * job.gpus,
    }
