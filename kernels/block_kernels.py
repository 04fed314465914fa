"""Products with FP8 matrices on a GPU; kernels/ops/block_matmul.py says what they are.

Few rows read the matrix as it is stored: on Hopper by kernels/hopper_blocks.py, elsewhere by the
kernel here. Many rows multiply with bf16 made of it on the way, which is exact.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import hopper_blocks as hopper
from kernels.ops.block_matmul import reference
from kernels.triton_formats import bf16, fp8_halves, power_of, spread
from kernels.triton_quantise import power

FEW = 64  # rows that read the matrix as it is stored
_PIECE = 1 << 26  # values of a matrix that are in memory as bf16 at a time

# T = rows, N = outputs, K = dims


class Tiling(NamedTuple):
    """How the kernel for Hopper cuts a matrix; `parts` and `sub` say in which order sums go."""

    parts: int  # of the dims
    warps: int  # 16 outputs each
    stages: int
    sub: int  # times 128 dims at a time


def block_matmul(
    x_TK: Tensor, codes_NK: Tensor, scales: Tensor, *, tiling: Tiling | None = None
) -> Tensor:
    """As the reference, up to the order of sums; bf16 x, whose rows may be parts of wider rows.

    Scales are at most 2 ** 7. Up to 64 rows, a row gets the same bits in any batch. A matrix is
    multiplied by one call at a time.
    """
    if x_TK.dtype != torch.bfloat16 or codes_NK.shape[1] % 2:
        return reference(x_TK, codes_NK, scales)
    if len(x_TK) > FEW:
        return _decoded(x_TK, codes_NK, scales)
    if x_TK.stride(1) != 1 or x_TK.stride(0) % 8 or x_TK.data_ptr() % 16:
        x_TK = x_TK.clone(memory_format=torch.contiguous_format)
    out_TN = x_TK.new_empty(len(x_TK), len(codes_NK))
    if not out_TN.numel():
        return out_TN
    if tiling or _fits_hopper(codes_NK):
        outs, dims = codes_NK.shape
        _stream(x_TK, codes_NK, scales, out_TN, tiling or tiling_for(outs, dims, len(x_TK)))
    else:
        _launch(x_TK, codes_NK, scales, out_TN)
    return out_TN


# ------------------------------------------------------------------ few rows, on Hopper


def _fits_hopper(codes_NK: Tensor) -> bool:
    outs, dims = codes_NK.shape
    if outs % 64 or dims % 256:
        return False
    return torch.cuda.get_device_capability(codes_NK.device)[0] == 9


def tiling_for(outs: int, dims: int, rows: int) -> Tiling:
    """About 450 programs of at least 640 dims each; `rows` change no order of sums.

    Measured on an H200: docs/benchmarks.md.
    """
    tiles = outs // 64
    parts = max(1, min(dims // 640, (448 + tiles // 2) // tiles))
    return Tiling(parts, 4 if rows <= 32 or outs % 128 else 8, 4, 1)


def _stream(x_TK: Tensor, codes_NK: Tensor, scales: Tensor, out_TN: Tensor, tiling: Tiling) -> None:
    rows, (outs, dims) = len(x_TK), codes_NK.shape
    width = max(8, triton.next_power_of_2(min(rows, FEW)))
    grid = (triton.cdiv(rows, width), outs // (16 * tiling.warps), tiling.parts)
    partial, arrived = x_TK, x_TK  # not looked at
    if tiling.parts > 1:
        partial = torch.empty(tiling.parts * outs * width, device=x_TK.device)
        arrived = _counters(codes_NK)
    hopper.multiply[grid](
        x_TK,
        codes_NK,
        scales,
        out_TN,
        partial,
        arrived,
        rows,
        x_TK.stride(0),
        outs,
        dims,
        tiling.parts,
        SPLIT=tiling.parts > 1,
        N=width,
        W=tiling.warps,
        STAGES=tiling.stages,
        SUB=tiling.sub,
        num_warps=tiling.warps,
    )


_zeros: dict[tuple[int, int], Tensor] = {}


def _counters(codes_NK: Tensor) -> Tensor:
    """int32 zeros of a matrix, which each call finds and leaves; found by where the matrix is.

    A graph that is captured before any other call has its own, and makes them zero each time.
    """
    key = codes_NK.data_ptr(), len(codes_NK) // 64
    found = _zeros.get(key)
    if found is None:
        found = torch.zeros(key[1], dtype=torch.int32, device=codes_NK.device)
        if not torch.cuda.is_current_stream_capturing():
            _zeros[key] = found
    return found


# ------------------------------------------------------------------ few rows, on any GPU


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x,
    codes,
    scales,
    out,
    rows,
    x_stride,
    outs,
    K: tl.constexpr,
    OUT: tl.constexpr,
    M: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """OUT rows of the matrix times M rows of x; a word has two codes, or two values of x."""
    o = tl.program_id(0) * OUT + tl.arange(0, OUT)
    m = tl.arange(0, M)
    pair, group = tl.arange(0, PAIRS), tl.arange(0, PAIRS // 16)
    codes_OP = codes.to(tl.pointer_type(tl.int16)) + o.to(tl.int64)[:, None] * (K // 2)
    scales_OG = scales + (o // 32)[:, None] * tl.cdiv(K, 32)
    x_MP = x.to(tl.pointer_type(tl.int32)) + m.to(tl.int64)[:, None] * (x_stride // 2)
    total_OM = tl.zeros((OUT, M), tl.float32)
    for first in range(0, K // 2, PAIRS):
        inside = (first + pair < K // 2)[None, :]
        known = (first // 16 + group < (K + 31) // 32)[None, :]
        tile = tl.load(
            codes_OP + (first + pair)[None, :], mask=inside & (o < outs)[:, None], other=0
        )
        steps = tl.load(
            scales_OG + (first // 16 + group)[None, :], mask=known & (o < outs)[:, None], other=127
        )
        powers = power_of(tl.minimum(steps.to(tl.int32) - 127 + 120, 127))
        words = tl.load(x_MP + (first + pair)[None, :], mask=inside & (m < rows)[:, None], other=0)
        even, odd = fp8_halves(tile, spread(powers, 16))
        total_OM = tl.dot(even, tl.trans(bf16(words)), total_OM)
        total_OM = tl.dot(odd, tl.trans(bf16(words >> 16)), total_OM)
    at = m.to(tl.int64)[:, None] * outs + o[None, :]
    live = (m < rows)[:, None] & (o < outs)[None, :]
    tl.store(out + at, tl.trans(total_OM).to(out.dtype.element_ty), mask=live)


def _launch(x_TK: Tensor, codes_NK: Tensor, scales: Tensor, out_TN: Tensor) -> None:
    outs, dims = codes_NK.shape
    _multiply[(triton.cdiv(outs, 64),)](
        x_TK,
        codes_NK,
        scales,
        out_TN,
        len(x_TK),
        x_TK.stride(0),
        outs,
        K=dims,
        OUT=64,
        M=max(16, triton.next_power_of_2(len(x_TK))),
        PAIRS=64,
        num_warps=4,
        num_stages=4,
    )


# ------------------------------------------------------------------ many rows


@triton.jit
def _decode(codes, scales, out, outs, K: tl.constexpr):
    """32 rows of 128 dims into bf16."""
    o = tl.program_id(1).to(tl.int64) * 32 + tl.arange(0, 32)
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    g = tl.program_id(0) * 4 + tl.arange(0, 4)
    at = o[:, None] * K + k[None, :]
    inside = (o < outs)[:, None] & (k < K)[None, :]
    found = tl.load(codes + at, mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
    row = scales + tl.program_id(1) * ((K + 31) // 32)
    steps = tl.load(row + g, mask=g < (K + 31) // 32, other=127)
    factors = power(steps.to(tl.int32) - 127)
    values = tl.reshape(found.to(tl.float32), (32, 4, 32)) * factors[None, :, None]
    tl.store(out + at, tl.reshape(values, (32, 128)).to(tl.bfloat16), mask=inside)


def _decoded(x_TK: Tensor, codes_NK: Tensor, scales: Tensor) -> Tensor:
    outs, dims = codes_NK.shape
    step = max(32, _PIECE // dims // 32 * 32)
    if outs <= step:
        return x_TK @ decode(codes_NK, scales).T
    out_TN = x_TK.new_empty(len(x_TK), outs)
    for first in range(0, outs, step):
        weight_NK = decode(codes_NK[first : first + step], scales[first // 32 :])
        torch.mm(x_TK, weight_NK.T, out=out_TN[:, first : first + step])
    return out_TN


def decode(codes_NK: Tensor, scales: Tensor) -> Tensor:
    """bf16 [N, K]"""
    outs, dims = codes_NK.shape
    out_NK = torch.empty(outs, dims, dtype=torch.bfloat16, device=codes_NK.device)
    _decode[(triton.cdiv(dims, 128), triton.cdiv(outs, 32))](
        codes_NK, scales, out_NK, outs, K=dims, num_warps=4
    )
    return out_NK
