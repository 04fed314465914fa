"""New window rows at once: norm, rotary embedding, rounding to FP8, and their place in memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats import pack
from kernels.ops import norm_rows
from kernels.ops.turn_heads import reference as turned
from kernels.triton_quantise import e4m3, fp8_exponents, power

# N = rows, D = width, P = rotated pairs: the last 2 P dims, side by side


def reference(
    x_ND: Tensor, weight_D: Tensor, eps: float, turns_NP: Tensor, memory: Tensor, at_N: Tensor
) -> None:
    """Row n normed and turned, in the format "fp8", to bytes at[n] onwards of `memory`, uint8
    [bytes]; nowhere if at[n] < 0. The norm is rounded to the dtype of x, the turn is not.
    """
    live_N = at_N >= 0
    normed = norm_rows.reference(x_ND[live_N], weight_D, eps).plain_TD
    exact = normed.to(torch.promote_types(normed.dtype, torch.float32)).unsqueeze(1)
    packed = pack(turned(exact, turns_NP[live_N]).squeeze(1), "fp8")
    within = torch.arange(packed.shape[1], device=at_N.device)
    memory[at_N[live_N].unsqueeze(1) + within] = packed


@triton.jit
def _norm_rope_pack(
    x,
    weight,
    turns,
    memory,
    at_N,
    row_stride,
    eps,
    D: tl.constexpr,
    P: tl.constexpr,
    ALIGN: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    at = tl.load(at_N + n)
    if at < 0:
        return
    d = tl.arange(0, D)
    values = tl.load(x + n * row_stride + d).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    values = values * factor * tl.load(weight + d).to(tl.float32)
    values = values.to(x.dtype.element_ty).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (D // 2, 2)))
    pair = tl.arange(0, D // 2)
    turning = pair >= D // 2 - P
    place = (n * P + tl.maximum(pair - (D // 2 - P), 0)) * 2
    cos = tl.load(turns + place, mask=turning, other=1.0)
    sin = tl.load(turns + place + 1, mask=turning, other=0.0)
    values = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    groups = tl.reshape(values, (D // 32, 32))
    exponents = fp8_exponents(groups)
    codes = e4m3(groups * power(-exponents)[:, None]).to(tl.uint8, bitcast=True)
    row = memory + tl.multiple_of(at, ALIGN)
    tl.store(row + d, tl.reshape(codes, (D,)))
    tl.store(row + D + tl.arange(0, D // 32), (exponents + 127).to(tl.uint8))


def norm_rope_pack(
    x_ND: Tensor, weight_D: Tensor, eps: float, turns_NP: Tensor, memory: Tensor, at_N: Tensor
) -> None:
    """As the reference, up to the last bit of a sum. D is a power of two; the rows of x may be
    parts of wider rows; rows in memory begin at multiples of the largest power of two, at most 16,
    in a row's size.
    """
    if not x_ND.is_cuda:
        return reference(x_ND, weight_D, eps, turns_NP, memory, at_N)
    rows, width = x_ND.shape
    assert x_ND.stride(1) == 1
    assert width & (width - 1) == 0
    row_bytes = width + width // 32
    if rows:
        _norm_rope_pack[(rows,)](
            x_ND,
            weight_D,
            torch.view_as_real(turns_NP.contiguous()),
            memory,
            at_N,
            x_ND.stride(0),
            eps,
            D=width,
            P=turns_NP.shape[1],
            ALIGN=min(16, row_bytes & -row_bytes),
            num_warps=4 if width >= 256 else 1,
        )
    return None
