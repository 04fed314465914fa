"""Gumbel noise by counter: a function of (seed, position, purpose, token id) and nothing else.

So there is no sampler state to hand over, and neither the batch nor the rank nor a failover
changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from engine.device_copies import to_device
from kernels.ops.gumbel import noise

# S = rows

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the stride of SplitMix64
_FIRST = 0xBF58476D1CE4E5B9  # SplitMix64's two multipliers
_SECOND = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a draw is for; draws of one position must not share noise."""

    SAMPLE = 0


def noise_keys(
    seeds: Sequence[int],
    positions: Sequence[int],
    purpose: Purpose,
    device: torch.device | str = "cpu",
) -> Tensor:
    """int64 [S]: what stands for each (seed, position) in kernels/ops/gumbel.py."""
    keys = [
        _signed(_mix(_mix(_mix(seed) ^ position) ^ int(purpose)))
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return to_device(keys, torch.int64, device)


def gumbel(seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, size: int) -> Tensor:
    """Standard Gumbel noise [S, size], float64: a row for each (seed, position)."""
    return noise(noise_keys(seeds, positions, purpose), size)


def _mix(value: int) -> int:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
