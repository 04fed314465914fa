"""Rotations of heads and of index rows on a GPU, with the rounding that follows, in one pass.

The forms that kernels/ops/turn_heads.py, turn_fp4.py and pack_index_keys.py run on CUDA tensors;
these say what each computes. Rows may be parts of wider rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_quantise import e2m1, fp4_exponents, fp4_rounded, fp8_rounded, power

# N = rows of one head each, D = head size, P = rotated pairs: the last 2 P dims, side by side


@triton.jit
def _turned(x, turns, place, n, token, live, D: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    """float32 [N, B] at x[place]: D dims of rows n, of which the last 2 P are turned."""
    ROWS: tl.constexpr = n.shape[0]
    d = tl.arange(0, B)[None, :]
    pair = tl.arange(0, B // 2)[None, :]
    inside = live[:, None] & (d < D)
    values = tl.load(x + place[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (ROWS, B // 2, 2)))
    turning = live[:, None] & (pair >= D // 2 - P) & (pair < D // 2)
    at = (token[:, None] * P + (pair - (D // 2 - P))) * 2
    cos = tl.load(turns + at, mask=turning, other=1.0)
    sin = tl.load(turns + at + 1, mask=turning, other=0.0)
    return even, odd, cos, sin


@triton.jit
def _turn(
    x,
    turns,
    out,
    rows,
    heads,
    token_stride,
    head_stride,
    out_stride,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INVERSE: tl.constexpr,
    ROUND: tl.constexpr,  # "", "fp8" or "fp4"
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = n < rows
    token = n // heads
    place = token * token_stride + n % heads * head_stride
    even, odd, cos, sin = _turned(x, turns, place, n, token, live, D, P, BLOCK)
    if INVERSE:
        sin = -sin
    values = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (ROWS, BLOCK))
    if ROUND != "":
        groups = tl.reshape(values, (ROWS * (BLOCK // 32), 32))
        rounded = fp8_rounded(groups) if ROUND == "fp8" else fp4_rounded(groups)
        values = tl.reshape(rounded, (ROWS, BLOCK))
    d = tl.arange(0, BLOCK)[None, :]
    tl.store(
        out + n[:, None] * out_stride + d,
        values.to(out.dtype.element_ty),
        mask=live[:, None] & (d < D),
    )


def turn_heads(
    x_THd: Tensor, turns_TP: Tensor, *, inverse: bool = False, fp8: bool = False
) -> Tensor:
    """As the reference, up to the last bit of a turn; in place if x is contiguous."""
    size, pairs = x_THd.shape[2], turns_TP.shape[1]
    if not x_THd.is_contiguous():
        out_THd = torch.empty(x_THd.shape, dtype=x_THd.dtype, device=x_THd.device)
        _launch(x_THd, turns_TP, out_THd, inverse, "fp8" if fp8 else "")
    elif fp8:
        out_THd = x_THd
        _launch(x_THd, turns_TP, out_THd, inverse, "fp8")
    else:
        out_THd = x_THd
        rotated = x_THd[:, :, size - 2 * pairs :]  # nothing else changes
        _launch(rotated, turns_TP, rotated, inverse, "")
    return out_THd


def turn_fp4(x_Nhd: Tensor, turns_NP: Tensor) -> Tensor:
    """As the reference, up to the last bit of a turn."""
    out_Nhd = torch.empty(x_Nhd.shape, dtype=x_Nhd.dtype, device=x_Nhd.device)
    _launch(x_Nhd, turns_NP, out_Nhd, False, "fp4")
    return out_Nhd


def _launch(x_THd: Tensor, turns_TP: Tensor, out_THd: Tensor, inverse: bool, to: str) -> None:
    tokens, heads, size = x_THd.shape
    block = max(32 if to else 2, triton.next_power_of_2(size))
    assert x_THd.stride(2) == 1
    assert not to or size % 32 == 0
    if not x_THd.numel():
        return
    rows = max(1, 2048 // block)
    _turn[(triton.cdiv(tokens * heads, rows),)](
        x_THd,
        _parts(turns_TP),
        out_THd,
        tokens * heads,
        heads,
        x_THd.stride(0),
        x_THd.stride(1),
        out_THd.stride(1),
        D=size,
        P=turns_TP.shape[1],
        BLOCK=block,
        ROWS=rows,
        INVERSE=inverse,
        ROUND=to,
        num_warps=4,
    )


def _parts(turns_TP: Tensor) -> Tensor:
    """float32 [T, P, 2]"""
    turns_TP = turns_TP.to(torch.complex64).resolve_conj().contiguous()
    return torch.view_as_real(turns_TP)


# ------------------------------------------------------------------ index keys


@triton.jit
def _pack_keys(
    x, turns, memory, at_N, rows, stride, D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.load(at_N + n, mask=n < rows, other=-1)
    live = at >= 0
    even, odd, cos, sin = _turned(x, turns, n * stride, n, n, live, D, P, D)
    values = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    groups = tl.reshape(values, (ROWS * (D // 32), 32))
    exponents = fp4_exponents(groups)
    codes = e2m1(groups * power(-exponents)[:, None])
    low, high = tl.split(tl.reshape(codes, (ROWS, D // 2, 2)))
    row = (memory + tl.multiple_of(at, 2))[:, None]
    pair = tl.arange(0, D // 2)[None, :]
    tl.store(row + pair, (low | (high << 4)).to(tl.uint8), mask=live[:, None])
    scales = tl.reshape((exponents + 127).to(tl.uint8), (ROWS, D // 32))
    tl.store(row + D // 2 + tl.arange(0, D // 32)[None, :], scales, mask=live[:, None])


def pack_index_keys(x_Nd: Tensor, turns_NP: Tensor, memory: Tensor, at_N: Tensor) -> None:
    """As the reference, up to the last bit of a turn. d is a power of two, at least 32; rows begin
    at even bytes.
    """
    rows, size = x_Nd.shape
    assert x_Nd.stride(1) == 1
    if rows:
        _pack_keys[(triton.cdiv(rows, 8),)](
            x_Nd,
            _parts(turns_NP),
            memory,
            at_N,
            rows,
            x_Nd.stride(0),
            D=size,
            P=turns_NP.shape[1],
            ROWS=8,
            num_warps=4,
        )
