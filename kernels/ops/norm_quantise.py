"""Root-mean-square norm of each row, and its result in FP8 at once: what the next product reads."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats import pack
from kernels.triton_quantise import e4m3, fp8_exponents, power

# T = rows, D = width, a multiple of 32


def reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """uint8 [T, D + D / 32]: rows of the format "fp8" of x / sqrt(mean(x**2) + eps) * weight."""
    exact = x_TD.float()
    mean = exact.square().mean(-1, keepdim=True) + eps
    return pack(exact * mean.rsqrt() * weight_D.float(), "fp8")


@triton.jit
def _norm_quantise(x, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """One row, twice: the second time it comes from the cache."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, D, BLOCK):
        values = tl.load(x + t * D + first + i, mask=first + i < D, other=0.0).to(tl.float32)
        squares += values * values
    factor = tl.rsqrt(tl.sum(squares, 0) / D + eps)
    row = out + t * (D + D // 32)
    g = tl.arange(0, BLOCK // 32)
    for first in tl.static_range(0, D, BLOCK):
        d = first + i
        values = tl.load(x + t * D + d, mask=d < D, other=0.0).to(tl.float32) * factor
        values = values * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        groups = tl.reshape(values, (BLOCK // 32, 32))
        exponents = fp8_exponents(groups)
        codes = e4m3(groups * power(-exponents)[:, None]).to(tl.uint8, bitcast=True)
        tl.store(row + d, tl.reshape(codes, (BLOCK,)), mask=d < D)
        scales = (exponents + 127).to(tl.uint8)
        tl.store(row + D + first // 32 + g, scales, mask=first // 32 + g < D // 32)


def norm_quantise(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As the reference, up to the last bit of a sum. On a CPU the reference runs."""
    if not x_TD.is_cuda:
        return reference(x_TD, weight_D, eps)
    rows, width = x_TD.shape
    out = torch.empty(rows, width + width // 32, dtype=torch.uint8, device=x_TD.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _norm_quantise[(rows,)](
            x_TD.contiguous(), weight_D, out, eps, D=width, BLOCK=block, num_warps=4
        )
    return out
