"""What [deepspeed] refuses: each refusal names the key, the value and the mend."""

from typing import Any

import pytest

from pretrain.config_deepspeed import (
    FLAG,
    OFFLOAD_KEYS,
    TABLE_KEYS,
    TOP_KEYS,
    ZERO_KEYS,
    Kind,
    check_deepspeed,
    check_world,
)
from pretrain.errors import ConfigError

NVME = {"device": "nvme", "nvme_path": "/disk"}
REFUSED: list[tuple[int, dict[str, Any], list[str]]] = [
    (2, {"offload_param": {"device": "cpu"}}, ["offload_param", "zero_stage=2", "zero_stage=3"]),
    (1, {"zero_hpz_partition_size": 8}, ["zero_hpz_partition_size=8", "zero_stage=1", "zero_stage=3"]),
    (3, {"round_robin_gradients": True}, ["round_robin_gradients=True", "zero_stage=3", "zero_stage=1 or 2"]),
    (3, {"offload_optimiser": {"device": "cpu"}}, ["offload_optimiser", "did you mean offload_optimizer?"]),
    (3, {"zenflow": {}}, ["zenflow={}", "not passed through"]),
    (3, {"offload_optimizer": {"device": "disk"}}, ["offload_optimizer", "'disk'", '"none", "cpu" or "nvme"']),
    (3, {"offload_optimizer": True}, ["offload_optimizer=True", '"none", "cpu" or "nvme"']),
    (3, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, ["offload_optimizer.ratio", "[optimizer]"]),
    (3, {"offload_param": {"device": "cpu", "pin_memroy": True}}, ["pin_memroy", "did you mean pin_memory?"]),
    (3, {"offload_param": {"device": "nvme"}}, ['offload_param.device="nvme"', "lacks its nvme_path", "set nvme_path"]),
    (
        2,
        {"offload_optimizer": NVME},
        ['offload_optimizer.device="nvme"', "zero_stage=2", 'zero_stage=3 or device="cpu"'],
    ),
    (3, {"offload_optimizer": NVME | {"device": "cpu"}}, ["offload_optimizer.nvme_path", 'device="cpu"', "remove it"]),
    (3, {"offload_optimizer": NVME | {"buffer_size": 8}}, ["offload_optimizer.buffer_size", "not passed through"]),
    (3, {"offload_optimizer": NVME | {"buffer_count": 3}}, ["buffer_count=3", "set buffer_count=4"]),
    (3, {"offload_optimizer": NVME | {"pipeline_read": True}}, ["buffer_count=4", "set buffer_count=8"]),
    (3, {"offload_param": NVME, "stage3_max_reuse_distance": 9}, ["stage3_max_reuse_distance=9", "set stage3_max_r"]),
]


@pytest.mark.parametrize(("stage", "zero", "words"), REFUSED)
def test_what_a_stage_cannot_do_is_refused_by_name(stage: int, zero: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_deepspeed({"zero_optimization": zero}, stage)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"zero_optimization": 3}, "zero_optimization=3: a table"),
        ({"comms_logger": 3}, "comms_logger=3: a table"),
        ({"comms_logger": {"prof_ops": "all"}}, "comms_logger.prof_ops='all': a list of text"),
        ({"flops_profiler": {"recompute_fwd_factor": True}}, "recompute_fwd_factor=True: a number of at least 0"),
        ({"steps_per_print": 0}, "steps_per_print=0: a whole number of at least 1"),
        ({"wall_clock_breakdown": 1}, "wall_clock_breakdown=1: true or false"),
        ({"zero_optimization": {"stage": True}}, "stage=True"),
        *(
            ({"zero_optimization": {"reduce_bucket_size": bad}}, f"{bad!r}: a whole number of at least 1")
            for bad in ("big", -5, 0, [1], True, 1.5, float("inf"), 1e300)
        ),
        ({"zero_optimization": {"overlap_comm": "yes"}}, "overlap_comm='yes': true or false"),
        ({"zero_optimization": {"overlap_comm": 17}}, "overlap_comm=17: true or false"),
        ({"zero_optimization": {"sub_group_size": -1}}, "sub_group_size=-1: a whole number"),
        ({"zero_optimization": {"stage3_max_live_parameters": "a"}}, "stage3_max_live_parameters='a': a whole number"),
        ({"zero_optimization": {"zero_hpz_partition_size": True}}, "zero_hpz_partition_size=True: a whole number"),
        ({"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": 2}}}, "pin_memory=2: true or false"),
        ({"zero_optimization": {"offload_param": NVME | {"nvme_path": 3}}}, "nvme_path=3: text is wanted"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_the_kind_that_is_wanted(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_deepspeed(settings, 3)
    assert str(error.value).startswith("deepspeed.")
    assert said in str(error.value)


PROBES = (True, False, -1, 0, 1, 2, 3, 4, 5e8, 1.0, 0.5, "cpu", "nvme", "all_reduce", "a", ["all_reduce"], [], {})


def fitting(kind: Kind) -> list[Any]:
    return [value for value in PROBES if kind.fits(value)]


def test_deepspeed_itself_knows_every_key_and_takes_every_value_that_is_let_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that neither its next version nor this table drifts."""
    torch = pytest.importorskip("torch")
    from pretrain.parallel.zero import import_deepspeed

    for variable in ("DS_ACCELERATOR", "LOCAL_RANK"):  # given back at the end
        monkeypatch.setenv(variable, {"DS_ACCELERATOR": "cpu"}.get(variable, "0"))
    import_deepspeed(torch.device("cpu"))
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import constants
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload

    models = [
        (zero.DeepSpeedZeroConfig, {key: kind for key, (_, kind) in ZERO_KEYS.items()}),
        (offload.DeepSpeedZeroOffloadParamConfig, OFFLOAD_KEYS["offload_param"]),
        (offload.DeepSpeedZeroOffloadOptimizerConfig, OFFLOAD_KEYS["offload_optimizer"]),
        (CommsLoggerConfig, TABLE_KEYS["comms_logger"]),
    ]
    for model, kinds in models:
        fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        for key, kind in kinds.items():
            assert (kind is FLAG) == (fields[key] in (bool, bool | None)), key
            assert fitting(kind), key
            for value in fitting(kind):
                model(**{key: value})
    for key, kind in TABLE_KEYS["flops_profiler"].items():
        for value in fitting(kind):
            assert getattr(DeepSpeedFlopsProfilerConfig({"flops_profiler": {key: value}}), key) == value
    defaults = get_aio_config({"aio": {}})
    for key, kind in TABLE_KEYS["aio"].items():
        assert kind.fits(defaults[key]), key
    names = [name for module in (constants, zero) for name in vars(module).values() if isinstance(name, str)]
    known_elsewhere = {"aio", "comms_logger", "flops_profiler"}  # read above, from these tables
    assert set(TOP_KEYS) - known_elsewhere <= set(names)


def test_what_a_stage_heeds_is_let_through() -> None:
    check_deepspeed({"zero_optimization": {"reduce_bucket_size": 5e8, "overlap_comm": False}}, 2)
    check_deepspeed({"comms_logger": {"enabled": True, "prof_ops": []}, "flops_profiler": {"module_depth": -1}}, 2)
    check_deepspeed({"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}, 1)
    offload = {"device": "cpu"}
    plus = {"zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    check_deepspeed({"zero_optimization": plus | {"offload_param": offload}}, 3)
    pipelined = NVME | {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    swapped = {"offload_optimizer": pipelined, "offload_param": NVME | {"max_in_cpu": 0}}
    check_deepspeed({"zero_optimization": swapped, "aio": {"queue_depth": 16}}, 3)


@pytest.mark.parametrize(
    ("aio", "offload", "words"),
    [
        ({"queue_depth": 16}, {"device": "cpu"}, ["{'queue_depth': 16}", 'without an offload to device="nvme"']),
        ({"queue_deptj": 16}, NVME, ["aio.queue_deptj", "did you mean queue_depth?"]),
        ({"queue_depth": "16"}, NVME, ["aio.queue_depth='16'", "a whole number"]),
        (16, NVME, ["aio=16", "a table"]),
    ],
)
def test_how_files_are_read_is_refused_where_none_are_or_by_an_unknown_name(
    aio: Any, offload: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        check_deepspeed({"zero_optimization": {"offload_optimizer": offload}, "aio": aio}, 3)
    for word in words:
        assert word in str(error.value)


def test_a_second_copy_of_the_weights_must_divide_the_world() -> None:
    settings = {"zero_optimization": {"zero_hpz_partition_size": 8}}
    check_world(settings, 16)
    with pytest.raises(ConfigError, match="zero_hpz_partition_size=8 does not divide WORLD_SIZE=12"):
        check_world(settings, 12)
