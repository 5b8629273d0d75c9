"""What `[deepspeed]` may hold: settings that no other table decides and that a stage of ZeRO heeds. Never loads torch.

DeepSpeed itself takes unknown or unheeded settings in silence. Here a setting is passed through only where it takes
effect beside this project's engine; everything else is refused by name.
"""

import difflib
from typing import Any

from pretrain.errors import ConfigError

_DECIDED_ELSEWHERE = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_clipping": "train.grad_clip",
    "optimizer": "[optimizer]",
    "scheduler": "[schedule]",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "torch_autocast": "precision.compute",
    "communication_data_type": "precision.reduce",
    "data_types": "precision.reduce",
    "zero_allow_untested_optimizer": "[optimizer]",
    "activation_checkpointing": "[activation_checkpoint]",
    "wandb": "metrics.sinks",
    "tensorboard": "metrics.sinks",
}
_PASSED_THROUGH = (
    "zero_optimization",
    "aio",
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "memory_breakdown",
    "steps_per_print",
    "dump_state",
)
_ALL, _REDUCING, _THIRD = (1, 2, 3), (1, 2), (3,)
_ZERO_STAGES: dict[str, tuple[int, ...]] = {
    "stage": _ALL,
    "contiguous_gradients": _ALL,
    "reduce_scatter": _ALL,
    "reduce_bucket_size": _ALL,
    "overlap_comm": _ALL,
    "offload_optimizer": _ALL,
    "allgather_partitions": _REDUCING,
    "allgather_bucket_size": _REDUCING,
    "use_multi_rank_bucket_allreduce": _REDUCING,
    "round_robin_gradients": _REDUCING,
    "offload_param": _THIRD,
    "sub_group_size": _THIRD,
    "stage3_prefetch_bucket_size": _THIRD,
    "stage3_param_persistence_threshold": _THIRD,
    "stage3_model_persistence_threshold": _THIRD,
    "stage3_max_live_parameters": _THIRD,
    "stage3_max_reuse_distance": _THIRD,
    "stage3_module_granularity_threshold": _THIRD,
    "stage3_use_all_reduce_for_fetch_params": _THIRD,
    "stage3_allgather_sequential": _THIRD,
    "zero_hpz_partition_size": _THIRD,  # ZeRO++: a second copy of the weights, sharded over so many ranks
    "zero_quantized_weights": _THIRD,  # ZeRO++: int8 gathers
    "zero_quantized_gradients": _THIRD,  # ZeRO++: int4 and int8 reduction
}
_OFFLOAD = ("offload_optimizer", "offload_param")
_OFFLOAD_OPTIONS = ("device", "pin_memory")
_NEEDS_ITS_OWN_ADAM = ("ratio", "super_offload", "cpuadam_cores_perc")


def check_deepspeed(settings: dict[str, Any], stage: int) -> None:
    """ConfigError for the first setting of `[deepspeed]` that cannot take effect at ZeRO stage `stage`."""
    for key, value in settings.items():
        if key in _DECIDED_ELSEWHERE:
            raise ConfigError(f"deepspeed.{key}={value!r}: {_DECIDED_ELSEWHERE[key]} decides this; set it there")
        if key not in _PASSED_THROUGH:
            raise ConfigError(
                f"deepspeed.{key}={value!r} is not passed through; [deepspeed] takes {', '.join(_PASSED_THROUGH)}"
            )
    zero = settings.get("zero_optimization", {})
    if not isinstance(zero, dict) or zero.get("stage", stage) != stage:
        raise ConfigError(
            f"deepspeed.zero_optimization={zero!r} and parallel.zero_stage={stage} differ; "
            f"leave the stage out of the first"
        )
    for key, value in zero.items():
        name = f"deepspeed.zero_optimization.{key}={value!r}"
        if key not in _ZERO_STAGES:
            raise ConfigError(f"{name} is not passed through{_nearest(key, _ZERO_STAGES)}; remove it")
        if stage not in _ZERO_STAGES[key]:
            stages = " or ".join(map(str, _ZERO_STAGES[key]))
            raise ConfigError(f"{name} has no effect with parallel.zero_stage={stage}; set zero_stage={stages}")
        if key in _OFFLOAD and value is not None:
            _check_offload(key, value)


def check_world(settings: dict[str, Any], world_size: int) -> None:
    """ConfigError where hpZ's second copy of the weights cannot be cut as asked."""
    size = settings.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if not isinstance(size, int) or size < 1 or world_size % size:
        raise ConfigError(
            f"deepspeed.zero_optimization.zero_hpz_partition_size={size!r} does not divide WORLD_SIZE={world_size}; "
            f"set it to the ranks of a node"
        )


def _check_offload(key: str, value: Any) -> None:
    name = f"deepspeed.zero_optimization.{key}"
    device = value.get("device", "none") if isinstance(value, dict) else None
    if device == "nvme":
        raise ConfigError(f'{name}.device="nvme" is not available: checkpoints are taken from memory; set device="cpu"')
    if device not in ("none", "cpu"):
        raise ConfigError(f'{name}={value!r}: a table with device = "none" or "cpu" is wanted')
    for option in value:
        if option in _NEEDS_ITS_OWN_ADAM:
            raise ConfigError(f"{name}.{option} needs DeepSpeed's own Adam, but [optimizer] decides that; remove it")
        if option not in _OFFLOAD_OPTIONS:
            raise ConfigError(f"{name}.{option} is not passed through{_nearest(option, _OFFLOAD_OPTIONS)}; remove it")


def _nearest(key: str, known: Any) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
