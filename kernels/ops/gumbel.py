"""Draws from logits by a Gumbel maximum, with noise by counter: nothing but a row's key and an id
make it, and the same bits come out on every machine.

Each operation of the noise is one that IEEE 754 rounds exactly, in float64 and in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.exact import log

# S = rows, V = vocabulary

# SplitMix64: its stride, 2**64 / golden ratio, and its two multipliers; int64, whose products wrap
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)


def noise(keys_S: Tensor, size: int) -> Tensor:
    """Standard Gumbel noise [S, size], float64, of int64 keys."""
    ids_V = torch.arange(1, size + 1, dtype=torch.int64, device=keys_S.device)
    bits_SV = _mix(ids_V * GOLDEN + keys_S[:, None])
    # 52 bits and a half: never 0 or 1, and exact in float64
    uniform_SV = (_shift_right(bits_SV, 12).double() + 0.5) * 2.0**-52
    return -log(-log(uniform_SV))


def reference(scaled_SV: Tensor, keys_S: Tensor) -> Tensor:
    """int64 [S]: where float64 logits and noise together are largest, of equals the first.

    Logits over a temperature, -inf where an id must not come: a draw from their softmax.
    """
    return torch.argmax(scaled_SV + noise(keys_S, scaled_SV.shape[1]), dim=1)


def _mix(values: Tensor) -> Tensor:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    values = (values ^ _shift_right(values, 30)) * FIRST
    values = (values ^ _shift_right(values, 27)) * SECOND
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical, where torch's own shift of int64 repeats the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def gumbel_argmax(scaled_SV: Tensor, keys_S: Tensor) -> Tensor:
    """As the reference, which runs on a CPU; rows of NaN give any number."""
    if not scaled_SV.is_cuda:
        return reference(scaled_SV, keys_S)
    from kernels import gumbel_kernel  # needs Triton, which not every machine has

    return gumbel_kernel.gumbel_argmax(scaled_SV, keys_S)
