"""Bytes against sums done by hand, and the directions in which every setting must move them."""

from dataclasses import replace

import pytest

from pretrain.config import ModelConfig
from pretrain.metrics.flops import parameter_counts
from pretrain.metrics.hardware import device_named
from pretrain.plan.job import Job, Software
from pretrain.plan.memory import CONTEXT_BYTES, USABLE, fits, memory, optimizer_state_bytes

LLAMA3_8B = ModelConfig.model_validate({"preset": "llama3_8b"})
N = parameter_counts(LLAMA3_8B)
BLOCK = (N.attention + N.mlp) // 32
JOB = Job(model=LLAMA3_8B, seq_len=8192, device=device_named("h100-sxm"), dp_shard=8)


def test_fsdp_divides_fp32_weights_gradients_and_moments_over_the_shards():
    use = memory(JOB)
    values = (N.total - N.norms) / 8
    assert use.parameters == pytest.approx(4 * values)
    assert use.gradients == pytest.approx(4 * values)
    assert use.optimizer == pytest.approx(8 * values)
    assert optimizer_state_bytes(JOB) == pytest.approx(12 * N.total / 8)


def test_fsdp_gathers_two_blocks_and_the_head_and_buffers_one_groups_gradients():
    assert memory(JOB).gathered == pytest.approx(2 * (2 * BLOCK + N.head) + 6 * N.head)
    kept = memory(replace(JOB, reshard=False)).gathered
    assert kept - memory(JOB).gathered == pytest.approx(2 * 30 * BLOCK)
    assert memory(replace(JOB, dp_shard=1)).gathered == 0


def test_replicas_share_nothing_so_only_shards_divide_state():
    hsdp = replace(JOB, dp_replicate=4)
    assert memory(hsdp).peak == memory(JOB).peak
    assert memory(replace(JOB, dp_shard=32)).optimizer == memory(JOB).optimizer / 4


def test_context_parallel_ranks_shard_parameters_too_and_split_the_tokens():
    cp = replace(JOB, cp=2)
    assert memory(cp).optimizer == memory(JOB).optimizer / 2
    assert memory(cp).activations == memory(JOB).activations / 2


def test_local_accumulation_keeps_whole_fp32_gradients():
    use = memory(replace(JOB, local_accumulation=True))
    assert use.gradients == pytest.approx(4 * (N.total - N.norms))


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "moments"),
    [("zero1", 4 + 4 / 8, 4, 8 / 8), ("zero2", 4 + 4 / 8, 4 / 8, 8 / 8), ("zero3", 4 / 8, 4 / 8, 8 / 8)],
)
def test_zero_divides_what_its_stage_says(sharding, weights, gradients, moments):
    use = memory(replace(JOB, sharding=sharding, gather_bytes=4))
    values = N.total - N.norms
    assert use.parameters == pytest.approx(weights * values)
    assert use.gradients == pytest.approx(gradients * values)
    assert use.optimizer == pytest.approx(moments * values)


def test_full_recompute_keeps_one_vector_a_block_and_one_whole_block():
    d, tokens = 4096, 8192
    whole_block = 2 * (4 * d + 2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 32
    transient = 2 * (2 * 14336 + 2 * d)
    expected = tokens * (32 * 2 * d + (whole_block - 2 * d) + transient)
    assert memory(replace(JOB, recompute="full")).activations == pytest.approx(expected)


def test_recomputation_orders_activations_and_every_second_block_lies_between():
    def activations(mode: str, **changes: int) -> float:
        return memory(replace(JOB, recompute=mode, **changes)).activations

    assert activations("full") < activations("full", recompute_every=2) < activations("none")
    assert activations("full") < activations("selective") < activations("none")


def test_chunking_the_loss_divides_the_logits_and_nothing_else():
    whole, chunked = (memory(replace(JOB, loss_chunks=chunks)) for chunks in (1, 8))
    logits = 8192 * LLAMA3_8B.vocab_size * 10
    assert whole.logits - chunked.logits == pytest.approx(logits * 7 / 8)
    assert whole.activations == chunked.activations


def test_a_tied_table_is_kept_once():
    tied = ModelConfig.model_validate({"preset": "llama3_8b", "tie_embeddings": True})
    saved = memory(JOB).parameters - memory(replace(JOB, model=tied)).parameters
    assert saved == pytest.approx(4 * N.head / 8)


def test_fp32_compute_doubles_activations():
    assert memory(replace(JOB, compute="fp32")).activations > 1.9 * memory(JOB).activations


def test_unfused_software_keeps_more():
    assert memory(replace(JOB, recompute="none", software=Software(fused=False))).activations > (
        memory(replace(JOB, recompute="none")).activations
    )


def test_pipeline_stages_hold_several_micro_batches_but_no_more_than_there_are():
    stage = replace(JOB, pp=4, recompute="none", accumulation=8)
    assert memory(stage).activations > memory(replace(stage, accumulation=2)).activations
    assert memory(replace(stage, accumulation=4)).activations == memory(stage).activations


def test_a_job_fits_where_its_peak_leaves_room_for_what_the_allocator_does_not_see():
    needed = (memory(JOB).peak + CONTEXT_BYTES) / USABLE
    assert fits(replace(JOB, device=replace(JOB.device, memory_bytes=needed * 1.0001)))
    assert not fits(replace(JOB, device=replace(JOB.device, memory_bytes=needed * 0.9999)))
