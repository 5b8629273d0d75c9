"""Mixtures stay within one row of the shares asked for, at every place, in exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.mixture import LONGEST_PERIOD, Mixture
from pretrain.errors import ConfigError


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any))
def test_every_prefix_is_within_one_row_of_its_shares(weights):
    check(weights)


@pytest.mark.parametrize(
    "weights",
    [
        [1.0],
        [0.9, 0.1],
        [0.333, 0.333, 0.333],
        [0.6734, 0.2211, 0.1055],
        [0.85, *[0.01] * 15],
        [0.5, *[1 / 16] * 8],
        [1e-4, 0.9999],
        [82.0, 4.5, 4.5, 4.5, 2.0, 2.5],
    ],
)
def test_weights_as_people_write_them_are_exact(weights):
    check(weights)


def check(weights) -> None:
    mixture = Mixture(weights)
    shares = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    assert mixture.period == np.lcm.reduce([share.denominator for share in shares])
    source, nth = mixture.at(np.arange(mixture.period + 7))
    seen = [0] * len(weights)
    for place, which in enumerate(source.tolist()):
        assert nth[place] == seen[which]
        seen[which] += 1
        exact = [share * (place + 1) for share in shares] if place < 300 else []
        assert all(abs(have - want) < 1 for have, want in zip(seen, exact, strict=False))
    counts = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    places = np.arange(1, len(source) + 1)[:, None]
    assert (np.abs(counts * mixture.period - places * mixture.per_period) < mixture.period).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any), st.integers(0, 10**12))
def test_counts_and_inverse_agree_with_what_stands_where(weights, first):
    mixture = Mixture(weights)
    places = np.arange(first, first + 50)
    source, nth = mixture.at(places)
    before = mixture.counts(first)
    for number in range(len(weights)):
        mine = source == number
        assert nth[mine].tolist() == list(range(before[number], before[number] + mine.sum()))
        if mine.any():
            assert (mixture.places(number, nth[mine]) == places[mine]).all()
    assert before.sum() == first
    assert (mixture.counts(first + 50) - before == np.bincount(source, minlength=len(weights))).all()


def test_weights_that_repeat_only_after_long_are_refused_with_ones_that_do_not():
    weights = [123_456_789, 987_654_321, 5]
    with pytest.raises(ConfigError) as caught:
        Mixture(weights)
    message = str(caught.value)
    assert str(weights) in message
    assert "1,111,111,115 rows" in message
    assert f"{LONGEST_PERIOD:,}" in message
    assert "[0.1111, 0.8889, 0.0001]" in message
    assert Mixture([0.1111, 0.8889, 0.0001]).period == 10_001
