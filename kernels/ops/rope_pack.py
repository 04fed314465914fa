"""Rotary embedding of new cache rows, their rounding, and writing them where they belong."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats import pack
from kernels.triton_quantise import e2m1, e4m3, fp4_e4m3_steps, fp8_exponents, power

# N = rows, D = width, P = rotated pairs: the last 2 P dims, side by side


def reference(
    x_ND: Tensor, turns_NP: Tensor, memory: Tensor, at_N: Tensor, row_format: str
) -> None:
    """Row n turned by the complex `turns`, in the format "fp8" or "fp4_e4m3", to bytes at[n]
    onwards of `memory`, uint8 [bytes]; nowhere if at[n] < 0. Turned in float32, or in the dtype of
    x if that is wider.
    """
    live_N = at_N >= 0
    exact = x_ND[live_N].to(torch.promote_types(x_ND.dtype, torch.float32))
    pairs = turns_NP.shape[1]
    rotated = exact[:, -2 * pairs :].reshape(len(exact), pairs, 2).contiguous()
    turned = torch.view_as_complex(rotated) * turns_NP[live_N]
    exact = torch.cat([exact[:, : -2 * pairs], torch.view_as_real(turned).flatten(1)], 1)
    packed = pack(exact, row_format)
    within = torch.arange(packed.shape[1], device=at_N.device)
    memory[at_N[live_N].unsqueeze(1) + within] = packed


@triton.jit
def _rope_pack(
    x,
    turns,
    memory,
    at_N,
    rows,
    D: tl.constexpr,
    P: tl.constexpr,
    FP8: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.load(at_N + n, mask=n < rows, other=-1)
    live = (at >= 0)[:, None]
    d = tl.arange(0, D)[None, :]
    pair = tl.arange(0, D // 2)[None, :]
    values = tl.load(x + n[:, None] * D + d, mask=live, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (ROWS, D // 2, 2)))
    turning = live & (pair >= D // 2 - P)
    place = (n[:, None] * P + tl.maximum(pair - (D // 2 - P), 0)) * 2
    cos = tl.load(turns + place, mask=turning, other=1.0)
    sin = tl.load(turns + place + 1, mask=turning, other=0.0)
    values = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    GROUP: tl.constexpr = 32 if FP8 else 16
    GROUPS: tl.constexpr = D // GROUP
    groups = tl.reshape(values, (ROWS * GROUPS, GROUP))
    row = memory + tl.multiple_of(at, ALIGN)
    g = tl.arange(0, GROUPS)[None, :]
    if FP8:
        exponents = fp8_exponents(groups)
        codes = e4m3(groups * power(-exponents)[:, None]).to(tl.uint8, bitcast=True)
        tl.store(row[:, None] + d, tl.reshape(codes, (ROWS, D)), mask=live)
        scales = tl.reshape((exponents + 127).to(tl.uint8), (ROWS, GROUPS))
        tl.store(row[:, None] + D + g, scales, mask=live)
    else:
        steps = fp4_e4m3_steps(groups)
        exact = steps.to(tl.float32)[:, None]
        codes = e2m1(tl.div_rn(groups, tl.broadcast_to(exact, groups.shape)))
        low, high = tl.split(tl.reshape(codes, (ROWS, D // 2, 2)))
        tl.store(row[:, None] + pair, (low | (high << 4)).to(tl.uint8), mask=live)
        scales = tl.reshape(steps.to(tl.uint8, bitcast=True), (ROWS, GROUPS))
        tl.store(row[:, None] + D // 2 + g, scales, mask=live)


def rope_pack(
    x_ND: Tensor, turns_NP: Tensor, memory: Tensor, at_N: Tensor, row_format: str
) -> None:
    """As the reference, up to the last bit of a turn. D is a power of two; rows begin at multiples
    of the largest power of two, at most 16, in a row's size. On a CPU the reference runs.
    """
    if not x_ND.is_cuda:
        return reference(x_ND, turns_NP, memory, at_N, row_format)
    rows, width = x_ND.shape
    row_bytes = width + width // 32 if row_format == "fp8" else width // 2 + width // 16
    assert row_format in ("fp8", "fp4_e4m3")
    if rows:
        _rope_pack[(rows,)](
            x_ND.contiguous(),
            torch.view_as_real(turns_NP.contiguous()),
            memory,
            at_N,
            rows,
            D=width,
            P=turns_NP.shape[1],
            FP8=row_format == "fp8",
            ALIGN=min(16, row_bytes & -row_bytes),
            ROWS=1,
            num_warps=1,  # a row's groups stay within a warp: nothing goes through shared memory
        )
    return None
