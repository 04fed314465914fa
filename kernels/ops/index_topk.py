"""The best-scored compressed rows of each query row, from index keys as they lie in memory.

Scores: a tile of packed FP4 keys against all heads of one query row, both exact in bf16. Selection
in two levels, so that one query row keeps many programs busy. The largest score of each tile of
rows gives a bound that enough scores reach; each chunk keeps what reaches it, at most its own best;
then one program chooses among those. Where it must, a level finds the least score to choose by
bisection on its bits, and equal scores are taken in row order: the result is exact and does not
depend on tiles and chunks. Knows nothing of requests or layers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import hopper_index as hopper
from kernels.formats import unpack
from kernels.triton_formats import fp4_halves, power_of, spread

# T = query rows, H = index heads, d = index head size, P = pages of a row, J = rows to choose from


class Paged(NamedTuple):
    """FP4 index keys in `memory`, uint8 [bytes]; row j of query row t is row j % rows of the page
    that begins at byte at_TP[t, j // rows]. Pages begin at multiples of 4 bytes, or
    of 2 if a row is no multiple of 4.
    """

    memory: Tensor
    at_TP: Tensor  # int64
    rows: int  # of a page


def reference(q_THd: Tensor, weights_TH: Tensor, keys: Paged, seen_T: Tensor, count: int) -> Tensor:
    """int32 [T, count]: of each row's first `seen` keys the best, ascending, then -1.

    A score is the sum over heads of weight * relu(q . key); equal scores: the lower row.
    """
    return select_reference(scores_reference(q_THd, weights_TH, keys, seen_T), count)


def scores_reference(q_THd: Tensor, weights_TH: Tensor, keys: Paged, seen_T: Tensor) -> Tensor:
    """float32 [T, J], or in the dtype of q if that is wider; -inf from row `seen` on."""
    size, exact = q_THd.shape[-1], torch.promote_types(q_THd.dtype, torch.float32)
    nbytes = size // 2 + size // 32
    within = torch.arange(keys.rows * nbytes, device=keys.at_TP.device)
    packed = keys.memory[keys.at_TP.unsqueeze(-1) + within]
    packed = packed.view(len(q_THd), keys.at_TP.shape[1] * keys.rows, nbytes)
    keys_TJd = unpack(packed, "fp4", size).to(exact)
    products_THJ = (q_THd.to(exact) @ keys_TJd.transpose(1, 2)).relu_()
    scores_TJ = (weights_TH.to(exact).unsqueeze(1) @ products_THJ).squeeze(1)
    hidden_TJ = torch.arange(keys_TJd.shape[1], device=seen_T.device) >= seen_T.unsqueeze(1)
    return scores_TJ.masked_fill(hidden_TJ, -torch.inf)


def select_reference(scores_TJ: Tensor, count: int) -> Tensor:
    rows = scores_TJ.shape[1]
    order = torch.sort(scores_TJ, dim=-1, descending=True, stable=True)
    found = torch.where(order.values > -torch.inf, order.indices, rows)[:, :count]
    found = found.sort(dim=-1).values
    found = found.masked_fill(found == rows, -1)
    return torch.nn.functional.pad(found, (0, count - found.shape[1]), value=-1).int()


# ------------------------------------------------------------------ kernels


@triton.jit
def _score(
    q,
    weights,
    memory,
    at_TP,
    seen_T,
    scores,
    pages,
    rows,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keys tile * TILE onwards of query row t; nothing is written from row `seen` on."""
    t, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    seen = tl.load(seen_T + t)
    if tile * TILE >= seen:
        return
    BYTES: tl.constexpr = D // 2 + D // 32
    HALF: tl.constexpr = D // 2
    j = tile * TILE + tl.arange(0, TILE)
    live = j < seen
    page = tl.load(at_TP + t * pages + j // PAGE, mask=live, other=0)
    ALIGN: tl.constexpr = 4 if BYTES % 4 == 0 else 2
    row_N = memory + tl.multiple_of(page + j % PAGE * BYTES, ALIGN)
    pair = tl.arange(0, HALF)
    codes = tl.load(row_N[:, None] + pair[None, :], mask=live[:, None], other=0)
    steps = tl.load(
        (row_N + HALF)[:, None] + tl.arange(0, D // 32)[None, :], mask=live[:, None], other=0
    )
    powers = power_of(tl.minimum(steps.to(tl.int32) - 127 + 126, 127))
    even, odd = fp4_halves(codes, spread(powers, 16))
    h = tl.arange(0, H)
    q_at = (t * H + h)[None, :] * D + 2 * pair[:, None]
    products = tl.dot(even, tl.load(q + q_at))
    products = tl.dot(odd, tl.load(q + q_at + 1), products)
    weight = tl.load(weights + t * H + h)
    total = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
    tl.store(scores + t * rows + j, total, mask=live)


@triton.jit
def _in_order(scores):
    """Integers in the order of the scores, which equal ones share: -0.0 equals 0.0."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _least(order, count):
    """The `count`-th largest: bit by bit, the largest number that as many reach."""
    reached = tl.sum((order >= 0).to(tl.int32))
    bound = tl.where(reached >= count, 0, -2147483648)
    for bit in tl.static_range(30, -1, -1):
        higher = bound + (1 << bit)
        reached = tl.sum((order >= higher).to(tl.int32))
        bound = tl.where(reached >= count, higher, bound)
    return bound


@triton.jit
def _chosen(order, count):
    """Which `count` of them are largest, the first ones among equals."""
    bound = _least(order, count)
    above = order > bound
    room = count - tl.sum(above.to(tl.int32))
    equal = order == bound
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))


@triton.jit
def _maxima(scores, seen_T, maxima, rows, tiles, TILE: tl.constexpr, COUNT: tl.constexpr):
    """The largest of each tile's scores, as _in_order; of COUNT tiles."""
    t = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    n = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    live = n < tl.load(seen_T + t)
    values = tl.load(scores + t * rows + n, mask=live, other=float("-inf"))
    tl.store(maxima + t * tiles + tile, tl.max(_in_order(values), 1), mask=tile < tiles)


@triton.jit
def _bound(maxima, bounds, tiles, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The COUNT-th largest of a row's maxima: as many scores at least are no smaller."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)
    order = tl.load(maxima + t * tiles + n, mask=n < tiles, other=-2147483648)
    tl.store(bounds + t, _least(order, COUNT))


@triton.jit
def _select_chunk(
    scores, seen_T, bounds, best, best_row, rows, chunks, COUNT: tl.constexpr, CHUNK: tl.constexpr
):
    """At most the best COUNT of one chunk, in row order, and none below the bound: scores and
    rows; -inf behind them.
    """
    t, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    seen = tl.load(seen_T + t)
    first = chunk * CHUNK
    n = tl.arange(0, CHUNK)
    live = first + n < seen
    to = (t * chunks + chunk) * COUNT
    values = tl.load(scores + t * rows + first + n, mask=live, other=float("-inf"))
    order = _in_order(values)
    chosen = live & (order >= tl.load(bounds + t))
    found = tl.sum(chosen.to(tl.int32))
    if found > COUNT:
        chosen = _chosen(order, COUNT)
        found = COUNT
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(best + to + place, values, mask=chosen)
    tl.store(best_row + to + place, first + n, mask=chosen)
    k = tl.arange(0, COUNT)
    tl.store(best + to + k, tl.full((COUNT,), float("-inf"), tl.float32), mask=k >= found)


@triton.jit
def _select(
    best,
    best_row,
    seen_T,
    out,
    found,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The best COUNT of `found` candidates, which stand in row order; then -1.

    ROWS: candidates have the rows named; else they are the row's first `seen` scores themselves.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)
    stop = found
    if not ROWS:
        stop = tl.load(seen_T + t)
    values = tl.load(best + t * found + n, mask=n < stop, other=float("-inf"))
    chosen = _chosen(_in_order(values), COUNT) & (values > float("-inf"))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    row = n
    if ROWS:
        row = tl.load(best_row + t * found + n, mask=chosen, other=0)
    tl.store(out + t * COUNT + place, row, mask=chosen)
    k = tl.arange(0, COUNT)
    there = tl.sum(chosen.to(tl.int32))
    tl.store(out + t * COUNT + k, tl.full((COUNT,), -1, tl.int32), mask=k >= there)


# ------------------------------------------------------------------ launch

CHUNK = 8192  # scores that a program of the first level reads
DIRECT = 16384  # up to so many scores one program a row is faster than two levels
MOST_MAXIMA = 4096
MOST_CANDIDATES = 32768  # that one program holds in registers


def index_topk(
    q_THd: Tensor, weights_TH: Tensor, keys: Paged, seen_T: Tensor, count: int
) -> Tensor:
    """As the reference, up to the order in which a score's terms are added. q is bf16, weights
    float32, `seen` int32, `count` a power of two.
    """
    return select(index_scores(q_THd, weights_TH, keys, seen_T), seen_T, count)


def index_scores(
    q_THd: Tensor, weights_TH: Tensor, keys: Paged, seen_T: Tensor, *, portable: bool = False
) -> Tensor:
    """float32 [T, J]; what stands from row `seen` on is left as it was. On a CPU the reference."""
    if not q_THd.is_cuda:
        return scores_reference(q_THd, weights_TH, keys, seen_T)
    count, heads, size = q_THd.shape
    pages = keys.at_TP.shape[1]
    rows = pages * keys.rows
    scores_TJ = weights_TH.new_empty(count, rows)
    tensors = (
        q_THd.contiguous(),
        weights_TH.contiguous(),
        keys.memory,
        keys.at_TP.contiguous(),
        seen_T,
        scores_TJ,
        pages,
        rows,
    )
    if not scores_TJ.numel():
        return scores_TJ
    if not portable and _fits_hopper(q_THd, keys.rows):
        tiles = triton.cdiv(rows, hopper.TILE)
        each = max(1, min(16, tiles * count // 2048))  # enough programs, and few starts
        hopper.score[(triton.cdiv(tiles, each), count)](
            *tensors, PAGE=keys.rows, TILES=each, num_warps=4
        )
    else:
        _score[(triton.cdiv(rows, 128), count)](
            *tensors, PAGE=keys.rows, H=heads, D=size, TILE=128, num_warps=4, num_stages=1
        )
    return scores_TJ


def _fits_hopper(q_THd: Tensor, page: int) -> bool:
    if q_THd.shape[1:] != (hopper.HEADS, hopper.SIZE) or page % hopper.TILE:
        return False
    return torch.cuda.get_device_capability(q_THd.device)[0] == 9


def select(scores_TJ: Tensor, seen_T: Tensor, count: int) -> Tensor:
    """int32 [T, count]: the best of each row's first `seen` scores, ascending, then -1."""
    rows, length = scores_TJ.shape
    if not scores_TJ.is_cuda:
        hidden_TJ = torch.arange(length) >= seen_T.unsqueeze(1)
        return select_reference(scores_TJ.masked_fill(hidden_TJ, -torch.inf), count)
    out = seen_T.new_empty(rows, count, dtype=torch.int32)
    if not rows:
        return out
    if length <= DIRECT:
        return _choose(scores_TJ, None, seen_T, out)
    tile = max(16, triton.next_power_of_2(triton.cdiv(length, MOST_MAXIMA)))
    tiles = triton.cdiv(length, tile)
    maxima = seen_T.new_empty(rows, tiles)
    bounds = seen_T.new_empty(rows)
    each = max(1, 4096 // tile)
    _maxima[(triton.cdiv(tiles, each), rows)](
        scores_TJ, seen_T, maxima, length, tiles, TILE=tile, COUNT=each, num_warps=4
    )
    size = triton.next_power_of_2(tiles)
    _bound[(rows,)](maxima, bounds, tiles, COUNT=count, SIZE=size, num_warps=16)
    chunk = max(CHUNK, triton.next_power_of_2(length * count // MOST_CANDIDATES))
    chunks = triton.cdiv(length, chunk)
    best = scores_TJ.new_empty(rows, chunks * count)
    best_row = torch.empty_like(best, dtype=torch.int32)
    _select_chunk[(chunks, rows)](
        scores_TJ,
        seen_T,
        bounds,
        best,
        best_row,
        length,
        chunks,
        COUNT=count,
        CHUNK=chunk,
        num_warps=8,
    )
    return _choose(best, best_row, seen_T, out)


def _choose(values: Tensor, value_rows: Tensor | None, seen_T: Tensor, out: Tensor) -> Tensor:
    size = max(out.shape[1], triton.next_power_of_2(values.shape[1]))
    _select[(len(out),)](
        values,
        value_rows if value_rows is not None else seen_T,
        seen_T,
        out,
        values.shape[1],
        ROWS=value_rows is not None,
        COUNT=out.shape[1],
        SIZE=size,
        num_warps=min(32, max(4, size // 512)),
    )
    return out
