"""Gumbel noise by counter: a function of (seed, position, purpose, token id) and nothing else.

So there is no sampler state to hand over, and neither the batch nor the rank nor a failover
changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from engine.exact import log

# S = rows, V = vocabulary

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the stride of SplitMix64
_FIRST = 0xBF58476D1CE4E5B9  # SplitMix64's two multipliers
_SECOND = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a draw is for; draws of one position must not share noise."""

    SAMPLE = 0


def gumbel(
    seeds: Sequence[int],
    positions: Sequence[int],
    purpose: Purpose,
    size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard Gumbel noise [S, size], float64: a row for each (seed, position)."""
    keys = [
        _signed(_mix(_mix(_mix(seed) ^ position) ^ int(purpose)))
        for seed, position in zip(seeds, positions, strict=True)
    ]
    keys_S = torch.tensor(keys, dtype=torch.int64, device=device)
    ids_V = torch.arange(1, size + 1, dtype=torch.int64, device=device)
    bits_SV = _mix_tensor(ids_V * _signed(_GOLDEN) + keys_S[:, None])
    # 52 bits and a half: never 0 or 1, and exact in float64
    uniform_SV = (_shift_right(bits_SV, 12).double() + 0.5) * 2.0**-52
    return -log(-log(uniform_SV))


def _mix(value: int) -> int:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(values: Tensor) -> Tensor:
    """The same on int64, whose products wrap."""
    values = (values ^ _shift_right(values, 30)) * _signed(_FIRST)
    values = (values ^ _shift_right(values, 27)) * _signed(_SECOND)
    return values ^ _shift_right(values, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical, where torch's own shift of int64 repeats the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
