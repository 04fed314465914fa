"""The hash of a row of request state: one definition for every device.

A row's hash is the sum of its 32-bit words times odd 64-bit constants, keyed by the row's number
and mixed. (With words as wide as the arithmetic, two flipped sign bits would cancel out.) Guards
against accidents, not against forgery: the constants are public. Knows nothing of fields.
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


def row_hashes(rows: npt.NDArray[np.uint8], numbers: Hashes) -> Hashes:
    """[n]: of uint8 [n, row_bytes] standing for the rows numbered uint64 [n].

    In NumPy because it has unsigned 64-bit integers, and sums products in one pass.
    """
    if rows.shape[1] % WORD_BYTES:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % WORD_BYTES)))
    words = np.ascontiguousarray(rows).view(np.uint32).astype(np.uint64)
    sums = np.einsum("rw,w->r", words, word_factors(words.shape[1]))
    return _mixed(sums + numbers * np.uint64(GOLDEN))


@lru_cache
def word_factors(count: int) -> Hashes:
    """Odd constants without a pattern, [count]."""
    return _mixed(_mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN))) | np.uint64(
        1
    )


@lru_cache
def unit_factors(row_bytes: int, unit_bytes: int) -> Hashes:
    """[row_bytes / unit_bytes]: what to multiply units of 4, 2 or 1 bytes with for the same sum.

    A unit stands in its word some bits up; the sum is linear, so its factor takes the shift.
    """
    starts = np.arange(0, row_bytes, unit_bytes, dtype=np.uint64)
    factors = word_factors(-(-row_bytes // WORD_BYTES))[starts // np.uint64(WORD_BYTES)]
    shifted: Hashes = factors << (np.uint64(8) * (starts % np.uint64(WORD_BYTES)))
    return shifted


def _mixed(values: Hashes) -> Hashes:
    """A bijection of 64 bits after which sums no longer tell which values could be exchanged."""
    values = (values ^ (values >> np.uint64(32))) * np.uint64(MIXER)
    return values ^ (values >> np.uint64(29))
