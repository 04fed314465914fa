"""The hash of rows of request state: one definition for every device.

Rows are taken in groups: of a power of two of neighbours by number, as many as GROUP_BYTES hold.
A group's hash is its key, a mixed odd function of its number, times (the count of its rows + the
sum of its 32-bit words times odd 32-bit constants by their place in the group), modulo 2**64; a
row's hash is its share of that. So it is linear in the words: a device may add up whatever words
it has at hand, in any order, and multiplies by a key once a group. (Words narrower than the
arithmetic: two flipped sign bits do not cancel out.) Guards against accidents, not against
forgery: the constants are public. Knows nothing of fields.
Source: multilinear hashing, Lemire and Kaser, arXiv:1202.4961.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: steps that spread evenly
MIXER = 0xBF58476D1CE4E5B9  # a multiplier of splitmix64
WORD_BYTES = 4
GROUP_BYTES = 4608  # what a warp of a GPU has in nine of its widest registers
GROUP_ROWS = 64  # at most


def group_rows(row_bytes: int) -> int:
    """Rows of a group, a power of two: 16 of 288 bytes, 8 of 528, one of 4096 and of more."""
    most = min(GROUP_ROWS, max(1, GROUP_BYTES // row_bytes))
    return 1 << (most.bit_length() - 1)


def row_hashes(rows: npt.NDArray[np.uint8], numbers: Hashes) -> Hashes:
    """[n]: of uint8 [n, row_bytes] standing for the rows numbered uint64 [n], in any order."""
    words = _words(rows)
    size = np.uint64(group_rows(rows.shape[1]))
    factors = word_factors(int(size) * words.shape[1]).reshape(int(size), -1)
    sums = np.einsum("rw,rw->r", words, factors[numbers % size])
    hashes: Hashes = (sums + np.uint64(1)) * group_keys(numbers // size)
    return hashes


def hash_sum(rows: npt.NDArray[np.uint8], start: int) -> int:
    """The sum modulo 2**64 of the hashes of uint8 [n, row_bytes], the rows from number `start` on.

    In NumPy because it has unsigned 64-bit integers, and sums products in one pass.
    """
    words = _words(rows)
    size = group_rows(rows.shape[1])
    factors = word_factors(size * words.shape[1])
    head = min(len(words), -start % size)  # of a group that began earlier
    body = (len(words) - head) // size * size
    whole = words[head : head + body].reshape(-1, len(factors))
    sums = np.einsum("gw,w->g", whole, factors) + np.uint64(size)
    first = (start + head) // size
    total = int((sums * group_keys(np.arange(first, first + len(whole)))).sum())
    for part, number in ((words[:head], start), (words[head + body :], start + head + body)):
        if len(part):
            begin = number % size * words.shape[1]
            share = np.einsum("w,w->", part.reshape(-1), factors[begin : begin + part.size])
            total += (int(share) + len(part)) * int(group_keys(np.array([number // size]))[0])
    return total % 2**64


def group_keys(numbers: npt.NDArray[np.integer]) -> Hashes:
    """[n]: odd, so that nothing gets lost by multiplying with one."""
    return _mixed(numbers.astype(np.uint64) * np.uint64(GOLDEN)) | np.uint64(1)


@lru_cache
def word_factors(count: int) -> Hashes:
    """Odd constants below 2**32 without a pattern, [count]."""
    mixed = _mixed(_mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)))
    factors: Hashes = mixed >> np.uint64(32) | np.uint64(1)
    return factors


@lru_cache
def unit_factors(row_bytes: int, unit_bytes: int) -> Hashes:
    """[units of a group]: what to multiply units of 4, 2 or 1 bytes with for the same sum.

    A unit stands in its word some bits up; the sum is linear, so its factor takes the shift.
    """
    starts = np.arange(0, row_bytes, unit_bytes, dtype=np.uint64)
    size = group_rows(row_bytes)
    words = word_factors(size * -(-row_bytes // WORD_BYTES)).reshape(size, -1)
    factors = words[:, starts // np.uint64(WORD_BYTES)]
    shifted: Hashes = factors << (np.uint64(8) * (starts % np.uint64(WORD_BYTES)))
    return shifted.reshape(-1)


def _words(rows: npt.NDArray[np.uint8]) -> Hashes:
    """[n, words of a row], the last one filled up with zeros."""
    if rows.shape[1] % WORD_BYTES:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % WORD_BYTES)))
    return np.ascontiguousarray(rows).view(np.uint32).astype(np.uint64)


def _mixed(values: Hashes) -> Hashes:
    mixed: Hashes = (values ^ (values >> np.uint64(32))) * np.uint64(MIXER)
    return mixed
