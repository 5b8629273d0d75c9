"""Throughput, losses and waits of windows on a clock that the test turns by hand; ranks are threads."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from pretrain.metrics.console import format_line
from pretrain.metrics.flops import flops_per_token, recomputed_flops_per_token
from pretrain.metrics.meter import Meter

MODEL = SimpleNamespace(
    vocab_size=128,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    tie_embeddings=False,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sum_over_threads(world_size: int):
    """An all-reduce for ranks that are threads of this process."""
    barrier, vectors = threading.Barrier(world_size), []

    def all_reduce(vector: torch.Tensor) -> None:
        vectors.append(vector.clone())
        barrier.wait()
        vector.copy_(torch.stack(vectors[-world_size:]).sum(0))
        barrier.wait()

    return all_reduce


def on_ranks(world_size: int, function) -> list:
    results: list = [None] * world_size
    threads = [
        threading.Thread(target=lambda r=rank: results.__setitem__(r, function(r))) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def meter_for(**options) -> Meter:
    return Meter(MODEL, **{"seq_len": 16, "every": 1, "last_step": 10**6, **options})


@pytest.mark.parametrize("every", [1, 4])
def test_two_ranks_of_three_micro_batches_make_128_tokens_a_second_at_any_log_interval(every):
    """G40: Micro-batch 2 x seq 16 x accumulation 3 x 2 ranks = 192 tokens a step of 3 x 0.5 s; validation and a save
    of many seconds lie between."""
    all_reduce = sum_over_threads(2)

    def train(rank: int) -> list[dict]:
        clock, lines = Clock(), []
        meter = meter_for(every=every, rank=rank, world_size=2, all_reduce=all_reduce, clock=clock)
        for done in range(1, 9):
            for _ in range(3):
                clock.now += 0.5
                meter.add(torch.tensor(64.0), torch.tensor(32))
            meter.step_done(tokens=192, targets=192, data_wait=0.15)
            if done == 2:
                with meter.pause("eval"):
                    clock.now += 7.0
            if meter.due(done):
                lines.append(meter.close_window(done, 1e-3, 0.5, epoch=0.1))
            if done == 5:
                with meter.pause("save"):
                    clock.now += 11.0
        return lines

    for lines in on_ranks(2, train):
        assert [line["step"] for line in lines] == list(range(every, 9, every))
        for line in lines:
            assert line["tokens_per_second"] == pytest.approx(128)
            assert line["tokens_per_second_per_gpu"] == pytest.approx(64)
            assert line["step_seconds"] == pytest.approx(1.5)
            assert line["data_wait_fraction"] == pytest.approx(0.1)
            assert line["tokens"] == line["targets"] == 192 * line["step"]
            assert line["loss"] == pytest.approx(2.0)
        assert sum(line["eval_seconds"] for line in lines) == pytest.approx(7.0)
        assert sum(line["save_seconds"] for line in lines) == pytest.approx(11.0)


def test_loss_is_a_mean_over_targets_and_not_over_ranks_or_micro_batches():
    all_reduce = sum_over_threads(2)

    def train(rank: int) -> dict:
        meter = meter_for(rank=rank, world_size=2, all_reduce=all_reduce)
        meter.add(*((torch.tensor(30.0), torch.tensor(3)) if rank else (torch.tensor(5.0), torch.tensor(5))))
        meter.add(torch.tensor(0.0), torch.tensor(0))
        meter.step_done(tokens=10, targets=8, data_wait=0.0)
        return meter.close_window(1, 0.1, torch.tensor(2.5), epoch=0.0)

    for line in on_ranks(2, train):
        assert line["loss"] == pytest.approx(35 / 8)
        assert line["grad_norm"] == 2.5


def test_padding_counts_neither_as_token_nor_as_target_and_totals_go_on_from_a_resume():  # G40
    clock = Clock()
    meter = meter_for(clock=clock, tokens=1000, targets=900, attempt=2)
    meter.add(torch.tensor(12.0), 6)
    clock.now += 2.0
    meter.step_done(tokens=8, targets=6, data_wait=0.0)
    line = meter.close_window(201, 0.1, 1.0, epoch=0.0)
    assert (line["tokens"], line["targets"], line["attempt"], line["step"]) == (1008, 906, 2, 201)
    assert line["tokens_per_second"] == pytest.approx(4.0)


def test_the_slowest_wait_and_the_fullest_rank_are_what_is_reported(monkeypatch):
    all_reduce = sum_over_threads(3)

    def train(rank: int) -> dict:
        clock = Clock()
        meter = meter_for(rank=rank, world_size=3, all_reduce=all_reduce, clock=clock)
        meter._peak_bytes = lambda: [1.0, 3.0, 2.0][rank] * 2**30
        clock.now += 4.0
        meter.step_done(tokens=1, targets=1, data_wait=[1.0, 0.0, 2.0][rank])
        return meter.close_window(1, 0.1, 1.0, epoch=0.0)

    for line in on_ranks(3, train):
        assert line["peak_gib"] == 3.0
        assert line["data_wait_fraction"] == pytest.approx(0.5)


def test_mfu_divides_by_the_peak_in_both_conventions_and_hfu_adds_what_was_recomputed():
    clock, seq_len, peak = Clock(), 16, 1e9
    meter = meter_for(clock=clock, peak_flops=peak, recompute="full")
    clock.now += 0.5
    meter.step_done(tokens=100, targets=100, data_wait=0.0)
    line = meter.close_window(1, 0.1, 1.0, epoch=0.0)
    full, causal = (flops_per_token(MODEL, seq_len, causal=c) for c in (False, True))
    again = recomputed_flops_per_token(MODEL, seq_len, "full", causal=True)
    assert line["mfu_full"] == pytest.approx(200 * full / peak)
    assert line["mfu_causal"] == pytest.approx(200 * causal / peak)
    assert line["hfu"] == pytest.approx(200 * (causal + again) / peak)
    assert line["tflops_per_gpu"] == pytest.approx(200 * full / 1e12)


def test_where_nobody_knows_what_is_recomputed_hfu_is_null():
    meter = meter_for(peak_flops=1e9, recompute=None)
    meter.step_done(tokens=1, targets=1, data_wait=0.0)
    line = meter.close_window(1, 0.1, 1.0, epoch=0.0)
    assert line["hfu"] is None
    assert line["mfu_causal"] > 0


def test_without_a_known_peak_every_mfu_is_null_and_the_rest_stays():
    meter = meter_for()
    meter.step_done(tokens=1, targets=1, data_wait=0.0)
    line = meter.close_window(1, 0.1, 1.0, epoch=0.0)
    assert line["mfu_causal"] is None
    assert line["mfu_full"] is None
    assert line["hfu"] is None
    assert line["tflops_per_gpu"] > 0


def test_a_line_has_the_promised_fields_and_z_loss_only_where_it_is_on():  # G26
    meter = meter_for()
    meter.add(torch.tensor(4.0), 2)
    meter.step_done(tokens=2, targets=2, data_wait=0.0)
    plain = meter.close_window(1, 0.1, 1.0, epoch=0.5)
    assert set(plain) == {
        "step", "attempt", "tokens", "targets", "loss", "grad_norm", "lr", "step_seconds", "tokens_per_second",
        "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu_causal", "mfu_full", "hfu", "data_wait_fraction",
        "peak_gib", "epoch", "eval_seconds", "save_seconds",
    }  # fmt: skip
    meter.add(torch.tensor(4.0), 2, torch.tensor(0.5))
    meter.step_done(tokens=2, targets=2, data_wait=0.0)
    line = meter.close_window(2, 0.1, 1.0, epoch=0.5)
    assert line["z_loss"] == pytest.approx(0.25)
    assert line["loss"] == pytest.approx(2.0)


def test_a_window_without_targets_has_no_loss_rather_than_nan():
    meter = meter_for()
    meter.add(torch.tensor(0.0), 0)
    meter.step_done(tokens=4, targets=0, data_wait=0.0)
    assert meter.close_window(1, 0.1, 1.0, epoch=0.0)["loss"] is None


def test_a_loss_that_is_not_finite_is_shown_as_such():
    meter = meter_for()
    meter.add(torch.tensor(math.nan), 4)
    meter.step_done(tokens=4, targets=4, data_wait=0.0)
    assert math.isnan(meter.close_window(1, 0.1, 1.0, epoch=0.0)["loss"])


def test_windows_close_at_every_multiple_and_at_the_last_step():
    meter = meter_for(every=4, last_step=10)
    assert [done for done in range(1, 11) if meter.due(done)] == [4, 8, 10]


def test_sums_of_many_micro_batches_keep_what_float32_would_lose():
    meter = meter_for()
    for _ in range(1000):
        meter.add(torch.tensor(16777217.0, dtype=torch.float64), 1)
    meter.step_done(tokens=1, targets=1, data_wait=0.0)
    assert meter.close_window(1, 0.1, 1.0, epoch=0.0)["loss"] == 16777217.0


def test_adding_a_micro_batch_reads_nothing_back_from_the_device():
    """A meta tensor has no data: any read of it raises."""
    meter = meter_for(device="meta")
    meter.add(torch.zeros((), device="meta"), torch.zeros((), dtype=torch.int64, device="meta"))
    meter.step_done(tokens=1, targets=1, data_wait=0.0)


def test_several_ranks_without_an_all_reduce_are_refused():
    with pytest.raises(ValueError, match="world_size=2"):
        meter_for(world_size=2)


def test_the_rank_that_has_most_to_do_itself_is_named_beside_the_median_of_the_others():
    """All ranks have the same wall clock, since they wait for each other."""
    all_reduce = sum_over_threads(3)

    def train(rank: int) -> dict:
        own = Clock()
        meter = meter_for(every=2, rank=rank, world_size=3, all_reduce=all_reduce, clock=Clock(), own_clock=own)
        for _ in range(2):
            own.now += [1.0, 3.0, 1.5][rank]
            meter.step_done(tokens=1, targets=1, data_wait=[0.5, 0.5, 0.0][rank])
        return meter.close_window(2, 0.1, 1.0, epoch=0.0)

    for line in on_ranks(3, train):
        assert line["rank_seconds"] == [1.5, 3.5, 1.5]
        assert line["slowest_rank"] == 1
        assert line["slowest_over_median"] == pytest.approx(3.5 / 1.5)
        assert "rank 1 takes 2.33 x the others" in format_line(line, 10)
        assert "rank" not in format_line(line | {"slowest_over_median": 1.1}, 10)
