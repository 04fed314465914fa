"""Scores of packed FP4 index keys on Hopper's matrix units.

A program keeps the queries of all heads of one query row in shared memory and walks over tiles of
64 keys: read into registers, unpacked there, multiplied from there as the left operand.
Written in Gluon, Triton's lower level. Knows nothing of selection: see kernels/ops/index_topk.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gluon_formats import barrier, dim_in_word_order, left_bytes, left_scales, unpack_left

HEADS, SIZE, TILE = 32, 128, 64

_BYTES = gl.constexpr(left_bytes(4))
_SCALES = gl.constexpr(left_scales(4))
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _read(memory, at, tile, seen, PAGE: gl.constexpr):
    """Codes [64, 64] and scales [64, 4] of a tile; zeros from row `seen` on."""
    page = gl.load(at + tile * 64 // PAGE, mask=tile * 64 < seen, other=0)
    rows = memory + gl.multiple_of(page + tile * 64 % PAGE * 68, 4)
    j = gl.arange(0, 64, layout=gl.SliceLayout(1, _BYTES))
    byte = gl.arange(0, 64, layout=gl.SliceLayout(0, _BYTES))
    live = (tile * 64 + j < seen)[:, None]
    codes = gl.load(rows + (j * 68)[:, None] + byte[None, :], mask=live, other=0)
    j = gl.arange(0, 64, layout=gl.SliceLayout(1, _SCALES))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, _SCALES))
    live = (tile * 64 + j < seen)[:, None]
    scales = gl.load(rows + (j * 68 + 64)[:, None] + group[None, :], mask=live, other=0)
    return codes, scales


@gluon.jit
def score(
    q,
    weights,
    memory,
    at_TP,
    seen_T,
    scores,
    pages,
    rows,
    PAGE: gl.constexpr,
    TILES: gl.constexpr,
):
    """TILES tiles of one query row; nothing is written from row `seen` on. PAGE is a multiple of
    a tile.
    """
    t = gl.program_id(1).to(gl.int64)
    seen = gl.load(seen_T + t)
    first = gl.program_id(0) * TILES
    stop = gl.minimum(first + TILES, (seen + 63) // 64)
    if first >= stop:
        return
    at = at_TP + t * pages
    codes, scales = _read(memory, at, first, seen, PAGE)
    h = gl.arange(0, 32, layout=gl.SliceLayout(1, _QUERIES))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, _QUERIES))
    q_HD = gl.load(q + (t * 32 + h)[:, None] * 128 + dim_in_word_order(k)[None, :])
    queries = gl.allocate_shared_memory(gl.bfloat16, [32, 128], _SHARED)
    queries.store(q_HD)
    weight = gl.load(weights + t * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, _PRODUCT)))
    j = gl.arange(0, 64, layout=gl.SliceLayout(1, _PRODUCT))
    nothing = gl.zeros([64, 32], gl.float32, _PRODUCT)
    fence_async_shared()
    barrier()
    for tile in range(first, stop):
        left = unpack_left(codes, scales, 4, _PRODUCT)
        products = warpgroup_mma(
            left, queries.permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        codes, scales = _read(memory, at, tile + 1, seen, PAGE)
        products = warpgroup_mma_wait(0, deps=[products])
        total = gl.sum(gl.maximum(products, 0.0) * weight[None, :], 1)
        gl.store(scores + t * rows + tile * 64 + j, total, mask=tile * 64 + j < seen)
