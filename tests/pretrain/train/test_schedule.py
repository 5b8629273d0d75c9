"""The learning rate, update by update."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from small import small_config

from pretrain.train.schedule import lr_at


def rates(steps: int, **schedule: object) -> list[float]:
    changes = {f"schedule__{key}": value for key, value in schedule.items()}
    cfg = small_config("run", "data", train__steps=steps, optimizer__lr=1e-3, **changes)
    return [lr_at(update, cfg) for update in range(1, steps + 1)]


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_warm_up_starts_at_a_share_of_the_peak_and_the_last_update_is_the_floor(name: str) -> None:
    """G20, G21: update 1 has peak/10, update 10 the peak, the last the floor."""
    got = rates(100, name=name, warmup_steps=10, min_lr_ratio=0.1)
    assert got[0] == pytest.approx(1e-4)
    assert got[9] == pytest.approx(1e-3)
    assert got[10] < 1e-3
    assert got[-1] == pytest.approx(1e-4)
    assert got[9:] == sorted(got[9:], reverse=True)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates(110, name="cosine", warmup_steps=10, min_lr_ratio=0.0)[59] == pytest.approx(5e-4)


def test_wsd_holds_the_peak_and_decays_over_the_last_steps() -> None:
    got = rates(100, name="wsd", warmup_steps=10, decay_steps=20, min_lr_ratio=0.0)
    assert got[9:80] == [pytest.approx(1e-3)] * 71
    assert got[80] == pytest.approx(1e-3 * 19 / 20)
    assert got[-1] == pytest.approx(0.0)


def test_constant_stays_and_no_warm_up_starts_at_the_peak() -> None:
    assert rates(5, name="constant", warmup_steps=0) == [1e-3] * 5
    assert rates(5, name="cosine", warmup_steps=0, min_lr_ratio=0.0)[0] == pytest.approx(1e-3)
    assert rates(1, name="cosine", warmup_steps=0)[0] == pytest.approx(1e-3)
