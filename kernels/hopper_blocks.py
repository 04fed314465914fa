"""Products of few rows with FP8 matrices on Hopper: what counts is how fast codes come from memory.

A program multiplies some rows of the matrix by up to 64 rows of x, over one part of the dims. Codes
are copied into shared memory some steps ahead, become bf16 in registers, and are multiplied from
there as the left operand. A word of four codes gives its values in pairs two dims apart: x is put
into shared memory in that order. The program that ends last for a tile adds up its parts, always
in the same order: the sum of a row is the same in any batch.
Written in Gluon, Triton's lower level. Knows nothing of which parts suit which matrix.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gluon_formats import barrier

STEP = 128  # dims that are multiplied at a time

# O = OUT rows of the matrix in a program, 16 a warp; N = rows of x in it; K = 128 dims of a step,
# W = warps


# ------------------------------------------------------------------ layouts

_CODES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
_ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.constexpr_function
def _copies(warps):
    """16 bytes of codes, or 16 dims of x, a thread."""
    return gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def _product(warps, rows):
    """The layout of [O, N]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])


@gluon.constexpr_function
def _left(warps):
    """Of codes [W, 16, 4 blocks, 32 dims] as threads have them in a left operand."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[0, 0, 0, 4], [0, 0, 0, 8], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[bit, 0, 0, 0] for bit in (1, 2, 4) if bit < warps],
        [],
        [warps, 16, 4, 32],
    )


@gluon.constexpr_function
def _left_codes(warps):
    """The same of codes [O, K]."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16 * bit, 0] for bit in (1, 2, 4) if bit < warps],
        [],
        [16 * warps, 128],
    )


# ------------------------------------------------------------------ steps of a program

_WORD = gl.constexpr(
    # a word of e4m3 ($2) times a power of two, twice ($3): bits in their bf16 places are 2 ** -120
    # of a value
    """{
    .reg .b32 s, m;
    shl.b32 s, $2, 8;
    shl.b32 m, $2, 4;
    and.b32 m, m, 0x07F007F0;
    lop3.b32 m, s, 0x80008000, m, 0xEA;
    mul.rn.bf16x2 $0, m, $3;
    shr.b32 m, $2, 4;
    and.b32 m, m, 0x07F007F0;
    lop3.b32 m, $2, 0x80008000, m, 0xEA;
    mul.rn.bf16x2 $1, m, $3;
    }"""
)


@gluon.jit
def _unpack(codes, words, W: gl.constexpr, N: gl.constexpr):
    """The left operand [O, K] of codes and the words of four scales [W] of their blocks.

    Of every 16 dims, dim 4 q + i stands at place 2 q, 2 q + 8, 2 q + 1, 2 q + 9 for i = 0 .. 3.
    """
    layout: gl.constexpr = _left(W)
    each: gl.constexpr = gl.SliceLayout(3, layout)
    codes = gl.convert_layout(gl.reshape(codes, [W, 16, 4, 32]), layout, assert_trivial=True)
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, each)))
    block = gl.expand_dims(gl.expand_dims(block, 0), 1)
    words = gl.expand_dims(gl.expand_dims(words, 1), 2)
    powers = (((words >> (block * 8)) & 255) + 120) * 0x00800080
    codes, powers = gl.broadcast(codes, gl.expand_dims(powers, 3))
    values = gl.inline_asm_elementwise(
        _WORD, "=r,=r,r,r,r,r,r", [codes, powers], dtype=gl.bfloat16, is_pure=True, pack=4
    )
    # row, 16 dims, q, i % 2, i // 2 -> i % 2 of the dim, q, i // 2
    values = gl.permute(gl.reshape(values, [16 * W, 8, 4, 2, 2]), [0, 1, 3, 2, 4])
    values = gl.reshape(values, [16 * W, 128])
    left: gl.constexpr = gl.DotOperandLayout(0, _product(W, N), 2)
    return gl.convert_layout(values, left, assert_trivial=True)


@gluon.jit
def _put_rows(tile, values, N: gl.constexpr):
    """Rows of x [N, K] into shared memory, in the order of the left operand's dims."""
    values = gl.permute(gl.reshape(values, [N, 8, 4, 2, 2]), [0, 1, 4, 2, 3])
    tile.store(gl.reshape(values, [N, 128]))


@gluon.jit
def _copy(codes_s, codes_at, step, live, STAGES: gl.constexpr, SUB: gl.constexpr):
    for s in gl.static_range(SUB):
        async_copy.async_copy_global_to_shared(
            codes_s.index(step % STAGES * SUB + s), codes_at + (step * SUB + s) * 128, mask=live
        )
    async_copy.commit_group()


@gluon.jit
def _read(x_at, words_at, live, step, more, SUB: gl.constexpr):
    """Rows of x [N, K] and words of scales [W] of a step, into registers."""
    x_NK = ()
    words = ()
    for s in gl.static_range(SUB):
        at = step * SUB + s
        values = gl.load(x_at + at * 128, mask=live & more, other=0.0)
        x_NK = x_NK + (values,)  # type: ignore[assignment]
        words = words + (gl.load(words_at + at, mask=more, other=0),)  # type: ignore[assignment]
    return x_NK, words


@gluon.jit(do_not_specialize=["rows", "parts"])
def multiply(
    x,
    codes,
    scales,
    out,
    partial,
    arrived,
    rows,
    x_stride,
    outs,
    dims,
    parts,
    SPLIT: gl.constexpr,  # more than one part
    N: gl.constexpr,
    W: gl.constexpr,
    STAGES: gl.constexpr,
    SUB: gl.constexpr,
):
    """Tile o of the matrix times rows n of x, part p of the dims, SUB times 128 dims at a time.

    `outs` rows of the matrix are a multiple of 16 W, `dims` of 128 SUB; out is [rows, outs]. With
    parts, `partial` has room for each program's float32 [O, N] and `arrived` a zero for each tile,
    which is there again at the end.
    """
    OUT: gl.constexpr = 16 * W
    n0, o, p = gl.program_id(0) * N, gl.program_id(1), gl.program_id(2)
    dims = dims // 128 * 128  # tells the compiler that rows of codes begin at wide words
    steps = dims // (128 * SUB)
    first = p * steps // parts
    count = (p + 1) * steps // parts - first
    codes_s = gl.allocate_shared_memory(gl.uint8, [STAGES * SUB, OUT, 128], _CODES)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2 * SUB, N, 128], _ROWS)
    row = gl.arange(0, OUT, layout=gl.SliceLayout(1, _copies(W))).to(gl.int64) + o * OUT
    byte = gl.arange(0, 128, layout=gl.SliceLayout(0, _copies(W))) + first * (128 * SUB)
    codes_at = codes + row[:, None] * dims + byte[None, :]
    for k in gl.static_range(STAGES - 1):
        _copy(codes_s, codes_at, k, k < count, STAGES, SUB)
    n = gl.arange(0, N, layout=gl.SliceLayout(1, _copies(W))) + n0
    live = (n < rows)[:, None]
    x_at = x + n.to(gl.int64)[:, None] * x_stride + byte[None, :]
    sixteen = gl.arange(
        0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, _left(W))))
    )
    block_row = (o * OUT + sixteen * 16) // 32
    words_at = scales.to(gl.pointer_type(gl.int32)) + block_row * (dims // 128) + first * SUB
    x_NK, words = _read(x_at, words_at, live, 0, True, SUB)
    total_ON = gl.zeros([OUT, N], gl.float32, _product(W, N))
    for k in range(count):
        for s in gl.static_range(SUB):
            _put_rows(x_s.index(k % 2 * SUB + s), x_NK[s], N)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        ahead = k + STAGES - 1
        _copy(codes_s, codes_at, ahead, ahead < count, STAGES, SUB)
        now = words
        x_NK, words = _read(x_at, words_at, live, k + 1, k + 1 < count, SUB)
        for s in gl.static_range(SUB):
            tile = codes_s.index(k % STAGES * SUB + s).load(_left_codes(W))
            left = _unpack(tile, now[s], W, N)
            right = x_s.index(k % 2 * SUB + s).permute([1, 0])
            total_ON = warpgroup_mma(left, right, total_ON, is_async=True)
        total_ON, left = warpgroup_mma_wait(0, deps=[total_ON, left])
    async_copy.wait_group(0)
    h = gl.arange(0, OUT, layout=gl.SliceLayout(1, _product(W, N)))[:, None]
    n = gl.arange(0, N, layout=gl.SliceLayout(0, _product(W, N)))[None, :]
    if SPLIT:
        tile = gl.program_id(0) * gl.num_programs(1) + o
        tiles = gl.num_programs(0) * gl.num_programs(1)
        part_at = partial + tile.to(gl.int64) * (OUT * N) + (h * N + n)
        gl.store(part_at + p.to(gl.int64) * tiles * (OUT * N), total_ON)
        barrier()  # all threads' stores come before the word that they are done
        before = gl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before < parts - 1:
            return
        gl.store(arrived + tile, 0)
        total_ON = gl.zeros([OUT, N], gl.float32, _product(W, N))
        for part in range(parts):
            at = part_at + gl.cast(part, gl.int64) * tiles * (OUT * N)
            total_ON += gl.load(at, cache_modifier=".cg")
    at = out + (n0 + n).to(gl.int64) * outs + (o * OUT + h)
    gl.store(at, total_ON.to(out.dtype.element_ty), mask=n0 + n < rows)
