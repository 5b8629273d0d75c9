"""The step's time: parts against the arithmetic they stand for, and the directions settings must move it."""

from dataclasses import replace

import pytest

from pretrain.config import ModelConfig
from pretrain.metrics.flops import parameter_counts
from pretrain.metrics.hardware import DEVICES, device_named
from pretrain.plan.job import Job, Software
from pretrain.plan.time import Rates, matmul_rate, step_time, tokens_per_second_per_gpu

LLAMA3_8B = ModelConfig.model_validate({"preset": "llama3_8b"})
JOB = Job(model=LLAMA3_8B, seq_len=8192, device=device_named("h100-sxm"), dp_shard=8, accumulation=2)
IDEAL = Rates(matmul=1.0, attention=1.0, memory=1e6, kernel_seconds=0.0, hop_seconds=0.0, contention=0.0)


def test_ideal_matmuls_and_attention_take_their_flops_over_the_rate():
    job = replace(JOB, recompute="none")
    time, rate = step_time(job, IDEAL), matmul_rate(job, IDEAL)
    counts, tokens = parameter_counts(LLAMA3_8B), 2 * 8192
    assert time.matmul == pytest.approx(6 * (counts.attention + counts.mlp) * tokens / rate)
    assert time.head == pytest.approx(6 * counts.head * tokens / rate, rel=1e-3)
    forward = 2 * 32 * 4096 * 8192 * tokens  # causal
    assert time.attention == pytest.approx(3.5 * forward / rate)
    assert time.recompute == 0


def test_full_recompute_repeats_one_forward_of_the_blocks():
    none, full = (step_time(replace(JOB, recompute=mode), IDEAL) for mode in ("none", "full"))
    assert full.recompute == pytest.approx(none.matmul / 3 + none.attention / 3.5, rel=1e-3)
    half = step_time(replace(JOB, recompute="full", recompute_every=2), IDEAL)
    assert half.recompute == pytest.approx(full.recompute / 2)


def test_the_parts_add_up_and_the_largest_is_what_limits():
    time = step_time(JOB)
    assert time.total == pytest.approx(sum(time.parts().values()))
    assert time.parts()[time.limited_by] == max(time.parts().values())
    assert tokens_per_second_per_gpu(JOB) == pytest.approx(2 * 8192 / time.total)


def test_accumulation_costs_its_micro_batches_but_one_optimizer_step():
    two, four = step_time(JOB), step_time(replace(JOB, accumulation=4))
    assert four.matmul == pytest.approx(2 * two.matmul)
    assert four.optimizer == two.optimizer


def test_communication_that_compute_cannot_hide_is_exposed():
    """One short row a rank over many slow nodes: gathering the weights takes longer than using them."""
    short = replace(JOB, seq_len=256, dp_shard=512, fabric="efa", accumulation=1)
    assert step_time(short).limited_by == "data_parallel"
    long = replace(short, seq_len=8192, fabric="infiniband")
    assert step_time(long).data_parallel < 0.1 * step_time(long).total


def test_reducing_each_micro_batch_costs_more_than_once_a_step():
    slow = replace(JOB, seq_len=256, dp_shard=64, accumulation=8, fabric="efa")
    assert step_time(replace(slow, local_accumulation=True)).data_parallel < step_time(slow).data_parallel


def test_tensor_parallel_over_nodes_is_worse_than_inside_one():
    inside, over = (replace(JOB, tp=tp, dp_shard=1, micro_batch=8) for tp in (8, 16))
    assert step_time(inside).tensor_parallel / 8 < step_time(over).tensor_parallel / 16 * 2
    assert tokens_per_second_per_gpu(over) < tokens_per_second_per_gpu(inside)


def test_a_pipeline_loses_its_bubble_and_less_with_more_micro_batches():
    few, many = (step_time(replace(JOB, pp=4, accumulation=n)) for n in (4, 32))
    assert many.pipeline / many.total < few.pipeline / few.total < 0.6
    assert step_time(JOB).pipeline == 0


def test_python_is_the_limit_only_where_it_is_slower_than_the_gpu():
    slow = Software(host_layer_seconds=1.0)
    assert step_time(replace(JOB, software=slow)).limited_by == "host"
    assert step_time(JOB).host == 0


def test_a_power_limit_slows_matmuls_and_a_better_device_speeds_them():
    full, limited = (replace(JOB, device=device_named(name)) for name in ("h100-sxm", "h100-sxm-96gb"))
    assert matmul_rate(limited) < 0.9 * matmul_rate(full)
    b200 = replace(JOB, device=device_named("b200"))
    assert tokens_per_second_per_gpu(b200) > 1.5 * tokens_per_second_per_gpu(JOB)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_known_device_is_planned_below_its_peak(device):
    job = replace(JOB, device=device)
    assert 0 < matmul_rate(job) < device.bf16_flops
    assert step_time(job).total > 0
