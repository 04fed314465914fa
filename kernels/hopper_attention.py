"""Attention to packed rows on Hopper's matrix units, for 64 heads of 512 in bf16.

One program attends to one part of a row's list, in tiles of 64 keys, by two groups of warps: four
warps read packed rows and write them as bf16 into shared memory, eight multiply and keep the
softmax. So a tile is unpacked while the one before it is multiplied. The packed bytes are read
once; keys are values too, so that both products read the same tile.

Dims stand in the order in which words of eight are unpacked (kernels/gluon_formats.py): the queries
are put into that order, and the result back. Written in Gluon, Triton's lower level, which is what
names barriers and warp groups. Knows nothing of how a list is cut or how parts are merged: see
kernels/ops/packed_attention.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gluon_formats import ROWS, WORDS4, WORDS8, barrier, read, write_fp4, write_fp8

HEADS, SIZE, TILE = 64, 512, 64
WARPS = 8  # that the launch names: the consumer's

# H = heads, D = dims of a head, N = keys of a tile


# ------------------------------------------------------------------ layouts

_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_TILE_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
_BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
# both warp groups have all heads: half of the keys each, and half of the dims of the result
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_TOTAL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 8, 16]))

_NOTHING = gl.constexpr(-1.0e30)  # a logarithm of what has no weight, and still a number
_PRODUCER_WARPS = gl.constexpr(4)
_PRODUCER_REGISTERS = gl.constexpr(136)  # 120 and 152 are 7 % slower on an H200


# ------------------------------------------------------------------ the producer


@gluon.jit
def _places(at, first, count, LAYOUT: gl.constexpr):
    """Where the next keys of a list of `count` begin; -1 behind its end."""
    n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return gl.load(at + n, mask=n < count, other=-1)


@gluon.jit
def _produce(
    shared,
    lists,
    range_of_tiles,
    WINDOW: gl.constexpr,
    SELECTED: gl.constexpr,
    WINDOW_TILES: gl.constexpr,
):
    """Tiles first .. middle of the window and middle .. stop of the selected rows."""
    tiles, ready, free = shared
    window, window_at, selected, selected_at = lists
    first, middle, stop = range_of_tiles
    for tile in range(first, middle):
        place = tile - first
        at_N = _places(window_at, tile * 64, WINDOW, WORDS8)
        codes, scales = read(window, at_N, 8, WORDS8)
        at_N = _places(window_at, tile * 64 + ROWS, WINDOW, WORDS8)
        mbarrier.wait(free.index(place & 1), ((place >> 1) & 1) ^ 1)
        own = tiles.index(place & 1)
        write_fp8(own.slice(0, ROWS, 0), codes, scales)
        codes, scales = read(window, at_N, 8, WORDS8)
        write_fp8(own.slice(ROWS, ROWS, 0), codes, scales)
        fence_async_shared()
        mbarrier.arrive(ready.index(place & 1), count=1)
    # rows are read a tile ahead, and where they are, two; none of the next part
    end = gl.minimum((stop - WINDOW_TILES) * 64, SELECTED)
    begin = gl.maximum(middle - WINDOW_TILES, 0) * 64
    at_N = _places(selected_at, begin, end, WORDS4)
    other_N = _places(selected_at, begin + ROWS, end, WORDS4)
    codes, scales = read(selected, at_N, 4, WORDS4)
    other_codes, other_scales = read(selected, other_N, 4, WORDS4)
    at_N = _places(selected_at, begin + 64, end, WORDS4)
    other_N = _places(selected_at, begin + 64 + ROWS, end, WORDS4)
    for tile in range(middle, stop):
        place = tile - first
        mbarrier.wait(free.index(place & 1), ((place >> 1) & 1) ^ 1)
        own = tiles.index(place & 1)
        write_fp4(own.slice(0, ROWS, 0), codes, scales)
        codes, scales = read(selected, at_N, 4, WORDS4)
        write_fp4(own.slice(ROWS, ROWS, 0), other_codes, other_scales)
        fence_async_shared()
        mbarrier.arrive(ready.index(place & 1), count=1)
        other_codes, other_scales = read(selected, other_N, 4, WORDS4)
        begin = (tile + 2 - WINDOW_TILES) * 64
        at_N = _places(selected_at, begin, end, WORDS4)
        other_N = _places(selected_at, begin + ROWS, end, WORDS4)


# ------------------------------------------------------------------ the consumer


@gluon.jit
def _consume(
    tensors,
    shared,
    lists,
    part_and_tiles,
    WINDOW: gl.constexpr,
    SELECTED: gl.constexpr,
    WINDOW_TILES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """A running softmax over the tiles; logarithms to base 2."""
    q, sink, out, most, sums, scale = tensors
    queries, tiles, weights, ones, ready, free = shared
    window_at, selected_at = lists
    t, s, first, stop = part_and_tiles
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _ROWS))
    dim = gl.arange(0, 512, layout=gl.SliceLayout(0, _ROWS))
    q_HD = gl.load(q + (t * 64 + row)[:, None] * 512 + dim[None, :])
    q_HD = gl.permute(gl.reshape(q_HD, [64, 64, 2, 4]), [0, 1, 3, 2])
    queries.store(gl.reshape(q_HD, [64, 512]))
    ones.index(0).store(gl.full([16, 64], 1.0, gl.bfloat16, _ROWS))
    ones.index(1).store(gl.full([16, 64], 2.0**-8, gl.bfloat16, _ROWS))

    h = gl.arange(0, 64, layout=gl.SliceLayout(1, _LOGITS))
    n = gl.arange(0, 64, layout=gl.SliceLayout(0, _LOGITS))
    # the first part begins with the sink: it has weight and no value
    begins = s == 0
    most_H = gl.where(begins, gl.load(sink + h) * 1.4426950408889634, _NOTHING)
    total_HX = gl.zeros([64, 16], gl.float32, _TOTAL) + begins.to(gl.float32)
    result_HD = gl.zeros([64, 512], gl.float32, _RESULT)
    nothing_HN = gl.zeros([64, 64], gl.float32, _LOGITS)
    fence_async_shared()
    barrier()
    for tile in range(first, stop):
        place = tile - first
        keys = tiles.index(place & 1)
        far = tile >= WINDOW_TILES
        if far:
            key = (tile - WINDOW_TILES) * 64 + n
            at_N = gl.load(selected_at + key, mask=key < SELECTED, other=-1)
        else:
            key = tile * 64 + n
            at_N = gl.load(window_at + key, mask=key < WINDOW, other=-1)
        live_1N = (at_N >= 0)[None, :]
        lift = gl.where(far, 256.0, 1.0)  # selected keys are 2 ** 8 times what stands in the tile
        mbarrier.wait(ready.index(place & 1), (place >> 1) & 1)
        logits_HN = warpgroup_mma(
            queries, keys.permute([1, 0]), nothing_HN, use_acc=False, is_async=True
        )
        logits_HN = warpgroup_mma_wait(0, deps=[logits_HN])
        logits_HN = gl.where(live_1N, logits_HN * (scale * lift), _NOTHING)
        new_H = gl.maximum(most_H, gl.max(logits_HN, 1))
        kept_H = gl.exp2(most_H - new_H)
        weights_HN = gl.where(live_1N, gl.exp2(logits_HN - new_H[:, None]), 0.0)
        most_H = new_H
        weights.store((weights_HN * lift).to(gl.bfloat16))
        result_HD = result_HD * gl.convert_layout(kept_H, gl.SliceLayout(1, _RESULT))[:, None]
        total_HX = total_HX * gl.convert_layout(kept_H, gl.SliceLayout(1, _TOTAL))[:, None]
        fence_async_shared()
        barrier()
        # a product with ones adds up the weights as they were rounded, and saves a barrier
        one = ones.index(far.to(gl.int32)).permute([1, 0])
        total_HX = warpgroup_mma(weights, one, total_HX, is_async=True)
        result_HD = warpgroup_mma(weights, keys, result_HD, is_async=True)
        result_HD, total_HX = warpgroup_mma_wait(0, deps=[result_HD, total_HX])
        mbarrier.arrive(free.index(place & 1), count=1)

    sum_H = gl.max(total_HX, 1)  # all columns are the same
    if PARTS == 1:
        result_HD = result_HD / gl.convert_layout(sum_H, gl.SliceLayout(1, _RESULT))[:, None]
        turned = tiles.index(0)
        turned.store(result_HD.to(gl.bfloat16))
        barrier()
        out_HD = gl.permute(gl.reshape(turned.load(_ROWS), [64, 64, 4, 2]), [0, 1, 3, 2])
        out_HD = gl.convert_layout(gl.reshape(out_HD, [64, 512]), _ROWS)
        gl.store(out + (t * 64 + row)[:, None] * 512 + dim[None, :], out_HD)
    else:
        part = (t * PARTS + s) * 64
        gl.store(most + part + h, most_H)
        gl.store(sums + part + gl.arange(0, 64, layout=gl.SliceLayout(1, _TOTAL)), sum_H)
        head = gl.arange(0, 64, layout=gl.SliceLayout(1, _RESULT))
        column = gl.arange(0, 512, layout=gl.SliceLayout(0, _RESULT))
        gl.store(out + (part + head)[:, None] * 512 + column[None, :], result_HD)


# ------------------------------------------------------------------ kernel


@gluon.jit
def attend(
    q,
    window,
    window_at,
    selected,
    selected_at,
    sink,
    out,
    most,
    sums,
    scale,
    WINDOW: gl.constexpr,
    SELECTED: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Part s of row t into `out`: bf16 [T, H, D] of one part; of several float32 [T, S, H, D],
    not divided by their sums, dims of every eight in the order 0 4 1 5 2 6 3 7.
    """
    t, s = gl.program_id(0).to(gl.int64), gl.program_id(1)
    WINDOW_TILES: gl.constexpr = (WINDOW + 63) // 64
    TILES: gl.constexpr = WINDOW_TILES + (SELECTED + 63) // 64
    EACH: gl.constexpr = (TILES + PARTS - 1) // PARTS
    first = s * EACH
    stop = gl.minimum(first + EACH, TILES)
    middle = gl.minimum(gl.maximum(first, WINDOW_TILES), stop)
    window_at += t * WINDOW
    selected_at += t * SELECTED
    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 512], _TILE)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], _TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _TILE)
    ones = gl.allocate_shared_memory(gl.bfloat16, [2, 16, 64], _TILE)
    words = tiles._reinterpret(gl.int32, [2, 64, 256], _TILE_WORDS)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], _BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], _BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    (q, sink, out, most, sums, scale),
                    (queries, tiles, weights, ones, ready, free),
                    (window_at, selected_at),
                    (t, s, first, stop),
                    WINDOW,
                    SELECTED,
                    WINDOW_TILES,
                    PARTS,
                ),
            ),
            (
                _produce,
                (
                    (words, ready, free),
                    (window, window_at, selected, selected_at),
                    (first, middle, stop),
                    WINDOW,
                    SELECTED,
                    WINDOW_TILES,
                ),
            ),
        ],
        [_PRODUCER_WARPS],
        [_PRODUCER_REGISTERS],
    )
