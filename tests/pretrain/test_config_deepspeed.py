"""What [deepspeed] refuses: each refusal names the key, the value and the mend."""

from typing import Any

import pytest

from pretrain.config_deepspeed import check_deepspeed, check_world
from pretrain.errors import ConfigError

REFUSED: list[tuple[int, dict[str, Any], list[str]]] = [
    (2, {"offload_param": {"device": "cpu"}}, ["offload_param", "zero_stage=2", "zero_stage=3"]),
    (1, {"zero_hpz_partition_size": 8}, ["zero_hpz_partition_size=8", "zero_stage=1", "zero_stage=3"]),
    (3, {"round_robin_gradients": True}, ["round_robin_gradients=True", "zero_stage=3", "zero_stage=1 or 2"]),
    (3, {"offload_optimiser": {"device": "cpu"}}, ["offload_optimiser", "did you mean offload_optimizer?"]),
    (3, {"zenflow": {}}, ["zenflow={}", "not passed through"]),
    (3, {"offload_optimizer": {"device": "disk"}}, ["offload_optimizer", "'disk'", '"none" or "cpu"']),
    (3, {"offload_optimizer": True}, ["offload_optimizer=True", '"none" or "cpu"']),
    (3, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, ["offload_optimizer.ratio", "[optimizer]"]),
    (3, {"offload_param": {"device": "cpu", "pin_memroy": True}}, ["pin_memroy", "did you mean pin_memory?"]),
    (3, {"offload_param": {"device": "nvme"}}, ['offload_param.device="nvme"', 'device="cpu"']),
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
    check_deepspeed({"zero_optimization": plus | {"offload_param": offload}, "aio": {"queue_depth": 16}}, 3)


def test_a_second_copy_of_the_weights_must_divide_the_world() -> None:
    settings = {"zero_optimization": {"zero_hpz_partition_size": 8}}
    check_world(settings, 16)
    with pytest.raises(ConfigError, match="zero_hpz_partition_size=8 does not divide WORLD_SIZE=12"):
        check_world(settings, 12)
