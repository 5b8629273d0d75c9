"""A keyed permutation of 0 .. size - 1 that is computed, not stored: the same cost for ten rows as for 10^12.

A Feistel network permutes the numbers of just enough bits; a result that is too large is permuted again until it
fits (cycle walking: fewer than two turns on average). The round function mixes by multiplication and shifts as
splitmix64's finaliser does; this orders data, it hides nothing.
"""

import hashlib

import numpy as np

_ROUNDS = 8  # an even number; 4 already pass the tests of uniformity at small sizes
_LEAST_BITS = 5  # with 4, some orders of a few rows are twice as likely as others
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_32 = np.uint64(32)


def round_keys(*parts: int) -> np.ndarray:
    """uint64 [8]: independent keys for each choice of whole numbers (seed, source, epoch)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def permute(indices: np.ndarray, size: int, keys: np.ndarray, *, inverse: bool = False) -> np.ndarray:
    """int64 [n] of indices below `size` -> where the permutation takes them. `keys`: [8], or [8, n] for one
    permutation per index. `inverse` undoes it."""
    bits = max((size - 1).bit_length(), _LEAST_BITS)
    values = np.asarray(indices, np.uint64)
    values = _feistel(values, bits, keys, inverse)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        walked = _feistel(values[outside], bits, keys if keys.ndim == 1 else keys[:, outside], inverse)
        values[outside] = walked
        outside = outside[walked >= size]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray, inverse: bool) -> np.ndarray:
    """(left, right) -> (right, left ^ mixed right) a round. The halves of an odd number of bits differ by one, and so
    swap widths in each round; after an even number of rounds they are as before."""
    wide, narrow = np.uint64((bits + 1) // 2), np.uint64(bits // 2)
    mask = {width: np.uint64((1 << int(width)) - 1) for width in (wide, narrow)}
    left, right = values >> narrow, values & mask[narrow]  # left is the wide one
    if not inverse:
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right, keys[number]) & mask[narrow if number % 2 else wide])
    else:
        for number in reversed(range(_ROUNDS)):
            left, right = right ^ (_mixed(left, keys[number]) & mask[narrow if number % 2 else wide]), left
    return left << narrow | right


def _mixed(values: np.ndarray, key: np.ndarray) -> np.ndarray:
    mixed = (values + key) * _MIX
    mixed ^= mixed >> _32
    mixed *= _MIX
    return mixed >> _32
