"""The keyed permutation: one to one at any size, its inverse, and no order preferred over another."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.permutation import permute, round_keys


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.sampled_from([1, 2, 3, 64, 65, 97, 1009, 4096, 4097]), st.integers(1, 3000)), st.integers(0, 2**64))
def test_each_number_comes_once_and_the_inverse_leads_back(size, key):
    numbers = np.arange(size)
    permuted = permute(numbers, size, round_keys(key))
    assert sorted(permuted.tolist()) == numbers.tolist()
    assert (permute(permuted, size, round_keys(key), inverse=True) == numbers).all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([10**12, 10**12 + 39, 2**40, 2**40 + 1, 2**62]), st.integers(0, 2**32))
def test_huge_sizes_need_no_memory_and_lead_back(size, seed):
    numbers = np.unique(np.random.default_rng(seed).integers(0, size, 500))
    permuted = permute(numbers, size, round_keys(seed, 1))
    assert len(np.unique(permuted)) == len(numbers)
    assert ((permuted >= 0) & (permuted < size)).all()
    assert (permute(permuted, size, round_keys(seed, 1), inverse=True) == numbers).all()


def test_the_answer_does_not_depend_on_what_else_is_asked():
    together = permute(np.arange(1000), 1000, round_keys(3))
    assert [int(permute(np.array([k]), 1000, round_keys(3))[0]) for k in range(0, 1000, 37)] == together[::37].tolist()
    keys = np.stack([round_keys(3, epoch) for epoch in range(1000)], axis=1)
    mixed = permute(np.arange(1000), 1000, keys)
    assert mixed[7] == permute(np.array([7]), 1000, round_keys(3, 7))[0]
    assert (permute(mixed, 1000, keys, inverse=True) == np.arange(1000)).all()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_rows_are_equally_likely(size):
    """Chi-squared over 6,000 keys, fixed ones; its 99.9 % point is below mean + 4 deviations for each size."""
    keys = np.stack([round_keys(key) for key in range(6000)], axis=1).repeat(size, axis=1)
    permuted = permute(np.tile(np.arange(size), 6000), size, keys).reshape(-1, size)
    orders = Counter(map(tuple, permuted.tolist()))
    cells = math.factorial(size)
    expected = 6000 / cells
    chi_squared = sum((orders[order] - expected) ** 2 / expected for order in orders)
    chi_squared += (cells - len(orders)) * expected
    assert chi_squared < cells - 1 + 4 * math.sqrt(2 * (cells - 1))


@pytest.mark.parametrize("size", [20, 1000, 10_007])
def test_rows_keep_neither_their_place_nor_their_neighbour(size):
    """A random order has one fixed point and one pair in sequence on average, each Poisson."""
    numbers = np.arange(size)
    fixed = neighbours = 0
    for key in range(400):
        permuted = permute(numbers, size, round_keys(size, key))
        fixed += int((permuted == numbers).sum())
        neighbours += int((np.diff(permuted) == 1).sum())
    assert abs(fixed - 400) < 4 * 20
    assert abs(neighbours - 400) < 4 * 20


def test_neighbours_of_a_huge_set_are_spread_evenly():
    permuted = permute(np.arange(100_000), 10**12, round_keys(9))
    counts = np.histogram(permuted, bins=100, range=(0, 10**12))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 4 * math.sqrt(2 * 99)
