"""Logarithm and exponential in float64 that give the same bits on every machine.

They are made of operations that IEEE 754 rounds exactly. Library functions differ in the last bit
between vector units, which would be enough for another token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # 20 zero bits: its products here are exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LOWEST = -708.0  # below it exp is under the smallest normal number


def log(values: Tensor) -> Tensor:
    """Natural logarithm of positive float64, from exactly rounded operations only.

    values = m * 2**e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh((m - 1) / (m + 1)), whose
    argument is at most 0.1716: eleven terms reach float64's precision.
    """
    mantissa, exponent = torch.frexp(values)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = torch.where(small, exponent - 1, exponent)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.full_like(ratio, 1.0 / 21.0)
    for odd in range(19, 0, -2):
        series = series * square + 1.0 / odd
    return exponent.double() * math.log(2.0) + 2.0 * ratio * series


def exp(values: Tensor) -> Tensor:
    """e to the power of float64 values <= 0; those below -708 count as -708.

    values = k log 2 + r with |r| <= log(2) / 2, for which thirteen terms reach float64's precision.
    """
    values = values.clamp(min=_LOWEST)
    power = torch.round(values * (1.0 / math.log(2.0)))
    rest = (values - power * _LN2_HIGH) - power * _LN2_LOW
    series = torch.ones_like(rest)
    for term in range(13, 0, -1):
        series = series * rest * (1.0 / term) + 1.0
    scale = ((power.long() + 1023) << 52).view(torch.float64)  # 2**power, by its bits
    return series * scale
