"""What [deepspeed] refuses: each refusal names the key, the value and the mend."""

from typing import Any

import pytest

from pretrain.config_deepspeed import check_deepspeed, check_world
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
    (3, {"offload_param": {"device": "nvme"}}, ['offload_param.device="nvme"', "nvme_path=None", "set nvme_path"]),
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


def test_what_a_stage_heeds_is_let_through() -> None:
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
