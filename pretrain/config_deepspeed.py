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
_OFFLOAD_OPTIONS = ("device", "pin_memory")
_NVME_OPTIONS = {
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write"),
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
# With either, DeepSpeed 0.19 wants a swapped parameter twice or more of them at once than it has buffers, and fails.
_OFF_WITH_NVME = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
_AIO_OPTIONS = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
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
        if key in _NVME_OPTIONS and value is not None:
            _check_offload(key, value, stage)
        if key in _OFF_WITH_NVME and value and "offload_param" in swapping(zero):
            raise ConfigError(f'{name} fails beside offload_param.device="nvme"; set {key}=0 or leave it out')
    _check_aio(settings.get("aio", {}), swapping=bool(swapping(zero)))


def swapping(zero: dict[str, Any]) -> list[str]:
    """The keys of `zero_optimization` whose tables name a disk to swap to."""
    return [key for key in _NVME_OPTIONS if isinstance(zero.get(key), dict) and zero[key].get("device") == "nvme"]


def check_world(settings: dict[str, Any], world_size: int) -> None:
    """ConfigError where hpZ's second copy of the weights cannot be cut as asked."""
    size = settings.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if not isinstance(size, int) or size < 1 or world_size % size:
        raise ConfigError(
            f"deepspeed.zero_optimization.zero_hpz_partition_size={size!r} does not divide WORLD_SIZE={world_size}; "
            f"set it to the ranks of a node"
        )


def _check_offload(key: str, value: Any, stage: int) -> None:
    name = f"deepspeed.zero_optimization.{key}"
    device = value.get("device", "none") if isinstance(value, dict) else None
    if device not in ("none", "cpu", "nvme"):
        raise ConfigError(f'{name}={value!r}: a table with device = "none", "cpu" or "nvme" is wanted')
    for option in value:
        if option in _NEEDS_ITS_OWN_ADAM:
            raise ConfigError(f"{name}.{option} needs DeepSpeed's own Adam, but [optimizer] decides that; remove it")
        if option not in _OFFLOAD_OPTIONS + _NVME_OPTIONS[key]:
            near = _nearest(option, _OFFLOAD_OPTIONS + _NVME_OPTIONS[key])
            raise ConfigError(f"{name}.{option} is not passed through{near}; remove it")
        if option in _NVME_OPTIONS[key] and device != "nvme":
            raise ConfigError(f'{name}.{option} has no effect with device="{device}"; remove it or set device="nvme"')
    if device == "nvme":
        _check_nvme(name, value, stage)


def _check_nvme(name: str, value: dict[str, Any], stage: int) -> None:
    if stage < 3:
        raise ConfigError(
            f'{name}.device="nvme" stays in memory with parallel.zero_stage={stage}; set zero_stage=3 or device="cpu"'
        )
    if not isinstance(value.get("nvme_path"), str):
        raise ConfigError(
            f'{name}.device="nvme" with nvme_path={value.get("nvme_path")!r}; set nvme_path to a folder on a local disk'
        )
    # A master, two moments, a gradient; those of the next group if it is read ahead, of the last while it is written.
    least = 4 * (1 + bool(value.get("pipeline_read")) + bool(value.get("pipeline_write")))
    count = value.get("buffer_count", 4)
    if name.endswith("optimizer") and (not isinstance(count, int) or count < least):
        raise ConfigError(
            f"{name}.buffer_count={count} is too few for what is swapped at once; set buffer_count={least}"
        )


def _check_aio(aio: Any, *, swapping: bool) -> None:
    if not isinstance(aio, dict):
        raise ConfigError(f"deepspeed.aio={aio!r}: a table is wanted")
    if aio and not swapping:
        raise ConfigError(f'deepspeed.aio={aio!r} has no effect without an offload to device="nvme"; remove it')
    for key, value in aio.items():
        if key not in _AIO_OPTIONS:
            raise ConfigError(f"deepspeed.aio.{key} is not passed through{_nearest(key, _AIO_OPTIONS)}; remove it")
        if not isinstance(value, int):
            raise ConfigError(f"deepspeed.aio.{key}={value!r}: a whole number, or true or false, is wanted")


def _nearest(key: str, known: Any) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
