"""Triton's form of kernels/ops/gumbel.py: noise and maximum in one reading of the logits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gumbel import FIRST, GOLDEN, SECOND

# S = rows, P = parts of a row

_BLOCK = 1024  # ids that a program has in registers
_PARTS = 16  # of a row: 64 rows fill a GPU


@triton.jit
def _log(values, ROOT: tl.constexpr, LN2: tl.constexpr):
    """kernels/exact.py's, of normal numbers: exponent and mantissa are in their bits."""
    bits = values.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).to(tl.float64, bitcast=True)
    small = mantissa < ROOT
    mantissa = tl.where(small, mantissa * 2.0, mantissa)
    exponent = tl.where(small, exponent - 1, exponent)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = square * 0.0 + 1.0 / 21.0
    for step in tl.static_range(10):
        series = series * square + 1.0 / (19.0 - 2.0 * step)
    return exponent.to(tl.float64) * LN2 + 2.0 * ratio * series


@triton.jit
def _draw(
    scaled,
    keys_S,
    most_SP,
    at_SP,
    size,
    part,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ROOT: tl.constexpr,
    LN2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of ids part * p onwards of row s, of equals the first."""
    s = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0)
    key = tl.load(keys_S + s)
    lanes = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float64)
    at = tl.zeros((BLOCK,), tl.int64) + p * part + lanes
    for first in range(0, part, BLOCK):
        ids = (p * part + first + lanes).to(tl.int64)
        inside = (first + lanes < part) & (ids < size)
        bits = (ids + 1) * GOLDEN + key
        bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * FIRST
        bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * SECOND
        bits = bits ^ ((bits >> 31) & 0x1FFFFFFFF)
        uniform = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
        gumbel = -_log(-_log(uniform, ROOT, LN2), ROOT, LN2)
        value = tl.load(scaled + s * size + ids, mask=inside, other=float("-inf")) + gumbel
        better = inside & (value > most)
        most = tl.where(better, value, most)
        at = tl.where(better, ids, at)
    largest = tl.max(most, 0)
    tl.store(most_SP + s * tl.num_programs(0) + p, largest)
    tl.store(at_SP + s * tl.num_programs(0) + p, tl.min(tl.where(most == largest, at, size), 0))


def gumbel_argmax(scaled_SV: Tensor, keys_S: Tensor) -> Tensor:
    """As its reference; rows of NaN give any number."""
    rows, size = scaled_SV.shape
    part = triton.cdiv(size, _PARTS)
    most_SP = scaled_SV.new_empty(rows, _PARTS)
    at_SP = keys_S.new_empty(rows, _PARTS)
    _draw[(_PARTS, rows)](
        scaled_SV.contiguous(),
        keys_S,
        most_SP,
        at_SP,
        size,
        part,
        GOLDEN=GOLDEN,
        FIRST=FIRST,
        SECOND=SECOND,
        ROOT=math.sqrt(0.5),
        LN2=math.log(2.0),
        BLOCK=_BLOCK,
        enable_fp_fusion=False,  # a fused multiply-add rounds once, the reference twice
    )
    best_S = most_SP.argmax(1, keepdim=True)
    return at_SP.gather(1, best_S).squeeze(1)
