"""Rounding to e4m3 and e2m1 within Triton kernels, bit for bit as kernels/formats.py does it.

Works on groups: float32 [G, 32] or [G, 16], one scale each.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def power(exponents):
    """2 ** exponents in float32, for integers from -126 to 127."""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_exponents(groups):
    """The power of two [G] by which a group's values are divided before they become e4m3."""
    most = tl.maximum(tl.max(tl.abs(groups), 1), 1e-4)
    return ((most.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - (127 + 8)


@triton.jit
def e4m3(values):
    """The nearest e4m3 number, saturating at 448."""
    return tl.minimum(tl.maximum(values, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def fp8_rounded(groups):
    """The values that the format "fp8" keeps, in float32."""
    exponents = fp8_exponents(groups)
    return e4m3(groups * power(-exponents)[:, None]).to(tl.float32) * power(exponents)[:, None]


@triton.jit
def fp4_e4m3_steps(groups):
    """The step of each group of 16, an e4m3 number."""
    most = tl.maximum(tl.max(tl.abs(groups), 1), 6.0 * 0.001953125)
    return e4m3(tl.div_rn(most, tl.full(most.shape, 6.0, tl.float32)))


@triton.jit
def e2m1(values):
    """Codes of the nearest e2m1 numbers, ties to even, saturating at 6: int32 0 .. 15."""
    size = tl.minimum(tl.abs(values), 6.0)
    # numbers are halves up to 2, ones up to 4, twos up to 6; adding 1.5 * 2 ** 23 rounds to even
    steps = tl.where(size < 2.0, size * 2, tl.where(size < 4.0, size, size * 0.5))
    before = tl.where(size < 2.0, 0, tl.where(size < 4.0, 2, 4))
    code = (steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + before
    return code | ((values.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def fp4_exponents(groups):
    """The power of two [G] by which a group's values are divided before they become e2m1."""
    most = tl.maximum(tl.max(tl.abs(groups), 1), 6.0 * 1.1754943508222875e-38)
    return ((most.to(tl.int32, bitcast=True) + 0x3FFFFF) >> 23) - (127 + 2)


@triton.jit
def fp4_rounded(groups):
    """The values that the format "fp4" keeps, in float32."""
    exponents = fp4_exponents(groups)
    codes = e2m1(groups * power(-exponents)[:, None])
    size = codes & 7  # 0 0.5 1 1.5 2 3 4 6: two bits of an exponent, one of a mantissa
    bits = tl.where(size < 2, size * 0x3F000000, (size << 22) + 0x3F000000)
    bits = bits | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * power(exponents)[:, None]


# ------------------------------------------------------------------ whole rows


@triton.jit
def _round_rows(x, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
    rounded = tl.reshape(fp8_rounded(tl.reshape(values, (BLOCK // 32, 32))), (BLOCK,))
    tl.store(out + i, rounded.to(out.dtype.element_ty), mask=i < count)


def fp8_rounded_rows(x: Tensor) -> Tensor:
    """fake_quant(x, "fp8") of kernels/formats.py in one launch; rows are multiples of 32 wide."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        _round_rows[(triton.cdiv(x.numel(), 2048),)](x.contiguous(), out, x.numel(), BLOCK=2048)
    return out
