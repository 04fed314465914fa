"""Experts of few rows on Hopper: what counts is how fast their FP4 weights come from memory.

One program multiplies the rows of a block by two times 64 rows of an expert's matrix. Codes are
copied into shared memory a few tiles ahead, unpacked into registers and multiplied from there as
the left operand, so that even eight rows fill the matrix units. A word of codes gives its eight
values in pairs four dims apart: rows of x are stored in that order (`prepare`).
Written in Gluon, Triton's lower level. Knows nothing of how assignments become blocks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.expert_blocks import Blocks, shape_of, write_blocks
from kernels.gluon_formats import barrier, left_bytes, left_scales, unpack_left, word_order
from kernels.triton_quantise import fp8_rounded

STEP = 256  # dims that are multiplied at a time: both sizes of an expert are multiples of it

# O = 64 rows of a matrix, N = rows of a block, 8 or 16, K = 256 dims


# ------------------------------------------------------------------ rows of x


class Prepared(NamedTuple):
    """Rows of x in word order, bf16 [T, D], and which of them each expert multiplies."""

    x_TD: Tensor
    blocks: Blocks


@triton.jit
def _in_word_order(x, out, t, part, D: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr):
    d = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + t * D + d, mask=d < D, other=0.0)
    if FP8:
        groups = tl.reshape(values.to(tl.float32), (BLOCK // 32, 32))
        values = tl.reshape(fp8_rounded(groups), (BLOCK,)).to(tl.bfloat16)
    tl.store(out + t * D + word_order(d), values, mask=d < D)


@triton.jit
def _prepare(
    x,
    out,
    chosen,
    expert_B,
    assignment,
    count,
    most,
    experts,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first programs make the blocks of one expert each, the others order parts of rows."""
    program = tl.program_id(0)
    if program < experts:
        write_blocks(
            program, chosen, expert_B, assignment, count, most, BINS=BINS, SIZE=SIZE, CHUNK=CHUNK
        )
    else:
        PARTS: tl.constexpr = (D + BLOCK - 1) // BLOCK
        part = program - experts
        _in_word_order(x, out, (part // PARTS).to(tl.int64), part % PARTS, D, BLOCK, FP8)


def prepare(x_TD: Tensor, experts_TA: Tensor, experts: int, size: int, *, fp8: bool) -> Prepared:
    """What `stream` reads, in one launch; with `fp8` rounded as the format "fp8" rounds."""
    rows, width = x_TD.shape
    blocks = Blocks.empty(experts_TA, experts, size)
    out = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    _prepare[(experts + rows * triton.cdiv(width, 1024),)](
        x_TD.contiguous(),
        out,
        experts_TA.contiguous(),
        *blocks,
        experts_TA.numel(),
        len(blocks.expert_B),
        experts,
        D=width,
        BLOCK=1024,
        FP8=fp8,
        **shape_of(experts_TA, experts, size),
        num_warps=4,
    )
    return Prepared(out, blocks)


# ------------------------------------------------------------------ parts of a row


@triton.jit
def _sum_parts(parts, out, D: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        total += tl.load(parts + (t * SLOTS + slot) * D + d, mask=d < D, other=0.0)
    tl.store(out + t * D + d, total, mask=d < D)


def sum_parts(each_MD: Tensor, slots: int) -> Tensor:
    """float32 [T, D]: what `slots` assignments, one after the other, add up to, in their order."""
    rows, width = len(each_MD) // slots, each_MD.shape[1]
    out = each_MD.new_empty(rows, width)
    _sum_parts[(rows, triton.cdiv(width, 512))](
        each_MD, out, D=width, SLOTS=slots, BLOCK=512, num_warps=4
    )
    return out


# ------------------------------------------------------------------ layouts

_CODES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
_ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_COPY = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_BYTES = gl.constexpr(left_bytes(8))
_SCALES = gl.constexpr(left_scales(8))
_COPY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.constexpr_function
def _product(rows):
    """The layout of [O, N]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


# ------------------------------------------------------------------ kernel


@gluon.jit
def stream(
    x,
    codes,
    scales,
    expert_B,
    assignment_BN,
    shares,
    out,
    limit,
    ROWS: gl.constexpr,  # of each expert's matrix
    DIMS: gl.constexpr,
    FAN: gl.constexpr,  # assignments that share a row of x
    GATED: gl.constexpr,
    FP8: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Block b times 128 rows of its expert's matrix: into out[assignment].

    GATED: 64 of the gate and the same 64 of the other factor; `out` is bf16 in word order. Else
    `out` is float32. Scales are at most 2: their powers times 2 ** 126 must fit bf16.
    """
    o, b = gl.program_id(0), gl.program_id(1)
    expert = gl.load(expert_B + b).to(gl.int64)
    if expert < 0:
        return
    if GATED:
        one = expert * ROWS + o * 64
        other = one + ROWS // 2
    else:
        one = expert * ROWS + o * 128
        other = one + 64
    codes_s = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 64, 128], _CODES)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 256], _ROWS)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY)).to(gl.int64)
    byte = gl.arange(0, 128, layout=gl.SliceLayout(0, _COPY))
    within = row[:, None] * (DIMS // 2) + byte[None, :]
    one_at = codes + one * (DIMS // 2) + within
    other_at = codes + other * (DIMS // 2) + within
    n = gl.arange(0, N, layout=gl.SliceLayout(1, _COPY_ROWS))
    dim = gl.arange(0, 256, layout=gl.SliceLayout(0, _COPY_ROWS))
    assigned = gl.load(assignment_BN + b * N + n)
    live = (assigned >= 0)[:, None]
    x_at = x + (gl.maximum(assigned, 0) // FAN).to(gl.int64)[:, None] * DIMS + dim[None, :]
    for k in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(codes_s.index(2 * k), one_at + k * 128)
        async_copy.async_copy_global_to_shared(codes_s.index(2 * k + 1), other_at + k * 128)
        async_copy.async_copy_global_to_shared(x_s.index(k), x_at + k * 256, mask=live)
        async_copy.commit_group()
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _SCALES)).to(gl.int64)
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, _SCALES))
    scales_at = scales + row[:, None] * (DIMS // 32) + group[None, :]
    one_scales = gl.load(scales_at + one * (DIMS // 32))
    other_scales = gl.load(scales_at + other * (DIMS // 32))
    one_ON = gl.zeros([64, N], gl.float32, _product(N))
    other_ON = gl.zeros([64, N], gl.float32, _product(N))
    for k in range(DIMS // 256):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        ahead = k + STAGES - 1
        slot = ahead % STAGES
        more = ahead < DIMS // 256
        async_copy.async_copy_global_to_shared(
            codes_s.index(2 * slot), one_at + ahead * 128, mask=more
        )
        async_copy.async_copy_global_to_shared(
            codes_s.index(2 * slot + 1), other_at + ahead * 128, mask=more
        )
        async_copy.async_copy_global_to_shared(
            x_s.index(slot), x_at + ahead * 256, mask=live & more
        )
        async_copy.commit_group()
        now = k % STAGES
        right = x_s.index(now).permute([1, 0])
        left = unpack_left(codes_s.index(2 * now).load(_BYTES), one_scales, 8, _product(N))
        one_ON = warpgroup_mma(left, right, one_ON, is_async=True)
        one_ON = warpgroup_mma_wait(0, deps=[one_ON])
        left = unpack_left(codes_s.index(2 * now + 1).load(_BYTES), other_scales, 8, _product(N))
        next_at = scales_at + (k + 1) * 8
        one_scales = gl.load(next_at + one * (DIMS // 32), mask=k + 1 < DIMS // 256, other=0)
        other_scales = gl.load(next_at + other * (DIMS // 32), mask=k + 1 < DIMS // 256, other=0)
        other_ON = warpgroup_mma(left, right, other_ON, is_async=True)
        other_ON = warpgroup_mma_wait(0, deps=[other_ON])
    async_copy.wait_group(0)
    n = gl.arange(0, N, layout=gl.SliceLayout(0, _product(N)))
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, _product(N)))
    assigned = gl.load(assignment_BN + b * N + n)
    live = (assigned >= 0)[None, :]
    to = gl.maximum(assigned, 0).to(gl.int64)[None, :]
    if GATED:
        share = gl.load(shares + gl.maximum(assigned, 0))[None, :]
        gate = gl.minimum(one_ON, limit)
        up = gl.minimum(gl.maximum(other_ON, -limit), limit)
        hidden = (gate / (1 + gl.exp(-gate)) * up * share).to(gl.bfloat16)
        if FP8:
            grouped = gl.permute(gl.reshape(hidden.to(gl.float32), [2, 32, N]), [0, 2, 1])
            rounded = fp8_rounded(gl.reshape(grouped, [2 * N, 32]))
            rounded = gl.permute(gl.reshape(rounded, [2, N, 32]), [0, 2, 1])
            hidden = gl.convert_layout(gl.reshape(rounded, [64, N]), _product(N)).to(gl.bfloat16)
        gl.store(out + to * (ROWS // 2) + word_order(o * 64 + h)[:, None], hidden, mask=live)
    else:
        h += o * 128
        gl.store(out + to * ROWS + h[:, None], one_ON, mask=live)
        gl.store(out + to * ROWS + (h + 64)[:, None], other_ON, mask=live)
