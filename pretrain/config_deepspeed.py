"""What `[deepspeed]` may hold: settings that no other table decides and that a stage of ZeRO heeds. Never loads torch.

DeepSpeed itself takes unknown or unheeded settings in silence. Here a setting is passed through only where it takes
effect beside this project's engine, with a value of its kind; everything else is refused by name.
"""

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from pretrain.errors import ConfigError


class Kind(NamedTuple):
    """What a setting's value may be."""

    words: str
    fits: Callable[[Any], bool]


def _count(least: int) -> Kind:
    return Kind(f"a whole number of at least {least}", lambda value: type(value) is int and least <= value < 1 << 63)


def _elements(least: int) -> Kind:
    """A count that people write 5e8."""
    return Kind(
        f"a whole number of at least {least}",
        lambda value: type(value) in (int, float) and value % 1 == 0 and least <= value < 1 << 63,
    )


FLAG = Kind("true or false", lambda value: type(value) is bool)
_TEXT = Kind("text", lambda value: type(value) is str and value != "")
_TEXTS = Kind("a list of text", lambda value: type(value) is list and all(type(one) is str for one in value))
_NUMBER = Kind("a number of at least 0", lambda value: type(value) in (int, float) and 0 <= value < float("inf"))
_TABLE = Kind("a table", lambda value: isinstance(value, dict))
_OFFLOAD = _TABLE._replace(words='a table with device = "none", "cpu" or "nvme"')
_DEVICE = Kind('"none", "cpu" or "nvme"', lambda value: value in ("none", "cpu", "nvme"))
_STAGE = Kind("1, 2 or 3", lambda value: type(value) is int and 1 <= value <= 3)

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
_ALL, _REDUCING, _THIRD = (1, 2, 3), (1, 2), (3,)
ZERO_KEYS: dict[str, tuple[tuple[int, ...], Kind]] = {
    "stage": (_ALL, _STAGE),
    "contiguous_gradients": (_ALL, FLAG),
    "reduce_scatter": (_ALL, FLAG),
    "reduce_bucket_size": (_ALL, _elements(1)),
    "overlap_comm": (_ALL, FLAG),
    "offload_optimizer": (_ALL, _OFFLOAD),
    "allgather_partitions": (_REDUCING, FLAG),
    "allgather_bucket_size": (_REDUCING, _elements(1)),
    "use_multi_rank_bucket_allreduce": (_REDUCING, FLAG),
    "round_robin_gradients": (_REDUCING, FLAG),
    "offload_param": (_THIRD, _OFFLOAD),
    "sub_group_size": (_THIRD, _elements(1)),
    "stage3_prefetch_bucket_size": (_THIRD, _elements(0)),
    "stage3_param_persistence_threshold": (_THIRD, _elements(0)),
    "stage3_model_persistence_threshold": (_THIRD, _elements(0)),
    "stage3_max_live_parameters": (_THIRD, _elements(0)),
    "stage3_max_reuse_distance": (_THIRD, _elements(0)),
    "stage3_module_granularity_threshold": (_THIRD, _elements(0)),
    "stage3_use_all_reduce_for_fetch_params": (_THIRD, FLAG),
    "stage3_allgather_sequential": (_THIRD, FLAG),
    "zero_hpz_partition_size": (_THIRD, _count(1)),  # ZeRO++: a second copy of the weights, over so many ranks
    "zero_quantized_weights": (_THIRD, FLAG),  # ZeRO++: int8 gathers
    "zero_quantized_gradients": (_THIRD, FLAG),  # ZeRO++: int4 and int8 reduction
}
_NVME_KEYS = {
    "offload_optimizer": {"nvme_path": _TEXT, "buffer_count": _count(1), "pipeline_read": FLAG, "pipeline_write": FLAG},
    "offload_param": {
        "nvme_path": _TEXT,
        "buffer_count": _count(1),
        "buffer_size": _elements(1),
        "max_in_cpu": _elements(0),
    },
}
OFFLOAD_KEYS = {key: {"device": _DEVICE, "pin_memory": FLAG} | kinds for key, kinds in _NVME_KEYS.items()}
TOP_KEYS = {
    "zero_optimization": _TABLE,
    "aio": _TABLE,
    "comms_logger": _TABLE,
    "flops_profiler": _TABLE,
    "wall_clock_breakdown": FLAG,
    "memory_breakdown": FLAG,
    "steps_per_print": _count(1),
    "dump_state": FLAG,
}
TABLE_KEYS = {
    "aio": {
        "block_size": _count(1),
        "queue_depth": _count(1),
        "intra_op_parallelism": _count(1),
        "single_submit": FLAG,
        "overlap_events": FLAG,
    },
    "comms_logger": {"enabled": FLAG, "prof_all": FLAG, "prof_ops": _TEXTS, "verbose": FLAG, "debug": FLAG},
    "flops_profiler": {
        "enabled": FLAG,
        "recompute_fwd_factor": _NUMBER,
        "profile_step": _count(1),
        "module_depth": _count(-1),
        "top_modules": _count(1),
        "detailed": FLAG,
        "output_file": _TEXT,
    },
}
# With either, DeepSpeed 0.19 wants a swapped parameter twice or more of them at once than it has buffers, and fails.
_OFF_WITH_NVME = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
_NEEDS_ITS_OWN_ADAM = ("ratio", "super_offload", "cpuadam_cores_perc")


def check_deepspeed(settings: dict[str, Any], stage: int) -> None:
    """ConfigError for the first setting of `[deepspeed]` that cannot take effect at ZeRO stage `stage`."""
    for key, value in settings.items():
        if key in _DECIDED_ELSEWHERE:
            raise ConfigError(f"deepspeed.{key}={value!r}: {_DECIDED_ELSEWHERE[key]} decides this; set it there")
        if key not in TOP_KEYS:
            raise ConfigError(
                f"deepspeed.{key}={value!r} is not passed through; [deepspeed] takes {', '.join(TOP_KEYS)}"
            )
        _check_value(f"deepspeed.{key}", value, TOP_KEYS[key])
    zero = settings.get("zero_optimization", {})
    for key, value in zero.items():
        name = f"deepspeed.zero_optimization.{key}"
        if key not in ZERO_KEYS:
            raise ConfigError(f"{name}={value!r} is not passed through{_nearest(key, ZERO_KEYS)}; remove it")
        heeding, kind = ZERO_KEYS[key]
        if stage not in heeding:
            stages = " or ".join(map(str, heeding))
            raise ConfigError(
                f"{name}={value!r} has no effect with parallel.zero_stage={stage}; set zero_stage={stages}"
            )
        _check_value(name, value, kind)
        if key == "stage" and value != stage:
            raise ConfigError(f"{name}={value} and parallel.zero_stage={stage} differ; leave the first out")
        if key in OFFLOAD_KEYS:
            _check_offload(key, value, stage)
    for key in _OFF_WITH_NVME:
        if zero.get(key) and "offload_param" in swapping(zero):
            raise ConfigError(
                f'deepspeed.zero_optimization.{key}={zero[key]!r} fails beside offload_param.device="nvme"; '
                f"set {key}=0 or leave it out"
            )
    for key, kinds in TABLE_KEYS.items():
        _check_table(f"deepspeed.{key}", settings.get(key, {}), kinds)
    if settings.get("aio") and not swapping(zero):
        raise ConfigError(
            f'deepspeed.aio={settings["aio"]!r} has no effect without an offload to device="nvme"; remove it'
        )


def swapping(zero: dict[str, Any]) -> list[str]:
    """The keys of `zero_optimization` whose tables name a disk to swap to."""
    return [key for key in OFFLOAD_KEYS if isinstance(zero.get(key), dict) and zero[key].get("device") == "nvme"]


def check_world(settings: dict[str, Any], world_size: int) -> None:
    """ConfigError where hpZ's second copy of the weights cannot be cut as asked."""
    size = settings.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if world_size % size:
        raise ConfigError(
            f"deepspeed.zero_optimization.zero_hpz_partition_size={size!r} does not divide WORLD_SIZE={world_size}; "
            f"set it to the ranks of a node"
        )


def _check_value(name: str, value: Any, kind: Kind) -> None:
    if not kind.fits(value):
        raise ConfigError(f"{name}={value!r}: {kind.words} is wanted; set that or leave it out")


def _check_table(name: str, table: dict[str, Any], kinds: dict[str, Kind]) -> None:
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"{name}.{key}={value!r} is not passed through{_nearest(key, kinds)}; remove it")
        _check_value(f"{name}.{key}", value, kinds[key])


def _check_offload(key: str, table: dict[str, Any], stage: int) -> None:
    name, device = f"deepspeed.zero_optimization.{key}", table.get("device", "none")
    for option in table:
        if option in _NEEDS_ITS_OWN_ADAM:
            raise ConfigError(f"{name}.{option} needs DeepSpeed's own Adam, but [optimizer] decides that; remove it")
    _check_table(name, table, OFFLOAD_KEYS[key])
    if device == "nvme":
        _check_nvme(name, table, stage)
        return
    for option in table:
        if option in _NVME_KEYS[key]:
            raise ConfigError(f'{name}.{option} has no effect with device="{device}"; remove it or set device="nvme"')


def _check_nvme(name: str, value: dict[str, Any], stage: int) -> None:
    if stage < 3:
        raise ConfigError(
            f'{name}.device="nvme" stays in memory with parallel.zero_stage={stage}; set zero_stage=3 or device="cpu"'
        )
    if "nvme_path" not in value:
        raise ConfigError(f'{name}.device="nvme" lacks its nvme_path; set nvme_path to a folder on a local disk')
    # A master, two moments, a gradient; those of the next group if it is read ahead, of the last while it is written.
    least = 4 * (1 + value.get("pipeline_read", False) + value.get("pipeline_write", False))
    count = value.get("buffer_count", 4)
    if name.endswith("optimizer") and count < least:
        raise ConfigError(
            f"{name}.buffer_count={count} is too few for what is swapped at once; set buffer_count={least}"
        )


def _nearest(key: str, known: Any) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
