"""The gradient noise scale on gradients whose noise is known."""

import json
from typing import Any

import numpy as np
import pytest

from pretrain.errors import CheckpointError
from pretrain.metrics.noise_scale import NoiseScale


@pytest.mark.parametrize(("noise", "small", "big"), [(3.0, 8, 64), (20.0, 2, 512), (0.5, 4, 8)])
def test_the_scale_is_the_covariance_over_the_squared_gradient(noise: float, small: int, big: int) -> None:
    """A gradient of norm 1 and, a token, noise of total variance `noise` in 400 dimensions: the scale is `noise`."""
    rng = np.random.default_rng(0)
    truth = np.full(400, 1 / 20)
    scale, estimate = NoiseScale(decay=0.99), None
    for _ in range(2000):
        spread = np.sqrt(noise / 400)
        first = truth + spread / np.sqrt(small) * rng.standard_normal(400)
        rest = truth + spread / np.sqrt(big - small) * rng.standard_normal(400)
        whole = (small * first + (big - small) * rest) / big
        estimate = scale.update(float(first @ first), small, float(whole @ whole), big)
    assert estimate == pytest.approx(noise, rel=0.1)


def test_no_scale_is_made_up_where_the_numbers_do_not_give_one() -> None:
    scale = NoiseScale()
    assert scale.update(1.0, 0, 1.0, 64) is None, "a small batch without targets"
    assert scale.update(1.0, 64, 1.0, 64) is None, "one batch size"
    assert scale.update(8.0, 1, 1.0, 8) is None, "nothing but noise: eight tokens' mean has an eighth of one's square"
    assert scale.update(1.0, 8, 1.0, 64) == pytest.approx(7 / 0.9, rel=0.2), "the averages go on"


def test_averages_that_were_stored_go_on_bit_for_bit() -> None:
    squares = np.random.default_rng(0).uniform(1, 2, (8, 2)).tolist()
    unbroken, first, second = NoiseScale(), NoiseScale(), NoiseScale()
    expected = [unbroken.update(2 + small, 8, big, 64) for small, big in squares]
    assert None not in expected
    got = [first.update(2 + small, 8, big, 64) for small, big in squares[:4]]
    second.load(json.loads(json.dumps(first.state())))
    assert got + [second.update(2 + small, 8, big, 64) for small, big in squares[4:]] == expected


@pytest.mark.parametrize("state", [None, [1.0], [1.0, "2"], [1.0, float("nan")], {"0": 1.0, "1": 2.0}])
def test_what_is_no_pair_of_averages_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="no pair of averages"):
        NoiseScale().load(state)
