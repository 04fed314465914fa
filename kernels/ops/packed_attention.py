"""Attention of each row to packed rows where they lie in memory: nothing is unpacked into it.

Every row sees two lists of keys, which are also the values: window rows in FP8 and selected rows
in FP4 (kernels/formats.py), each named by the byte where it begins. All values of both formats
are exact in bf16, so only queries and softmax weights are rounded on the way to the matrix units.

The list is cut into a fixed number of parts, each attended to by a program of its own and then
merged; the number follows from the list's length and never from the batch. The kernel here runs on
any GPU: two values of a pair of dims stand in one word, so it handles dims in two halves, the even
ones and the odd ones. For the real model's shape on Hopper there is another, four times as fast, in
kernels/hopper_attention.py. Knows nothing of requests, slabs or layers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import hopper_attention as hopper
from kernels.formats import unpack
from kernels.triton_formats import bf16, fp4_halves, fp8_halves, power_of, spread

# T = rows, H = heads, d = head size, W = window rows, K = selected rows, S = parts of the list


class Located(NamedTuple):
    """Packed rows in `memory`, uint8 [bytes]; row n begins at byte at_TN[t, n], nowhere if < 0.

    `at` is int64; rows begin at multiples of the largest power of two, at most 16, in a row's size.
    """

    memory: Tensor
    at_TN: Tensor


def reference(q_THd: Tensor, window: Located, selected: Located | None, sink_H: Tensor) -> Tensor:
    """[T, H, d] in the dtype of q: one softmax over all keys of a row; the sink adds nothing.

    Computed in float32 if the dtype of q is narrower.
    """
    size, exact = q_THd.shape[-1], torch.promote_types(q_THd.dtype, torch.float32)
    keys_TNd, mask_T1N = _keys(window, "fp8", size)
    if selected is not None:
        more_TKd, more_T1K = _keys(selected, "fp4_e4m3", size)
        keys_TNd = torch.cat([keys_TNd, more_TKd], 1)
        mask_T1N = torch.cat([mask_T1N, more_T1K], 2)
    keys_TNd = keys_TNd.to(exact)
    logits_THN = q_THd.to(exact) @ keys_TNd.transpose(1, 2) * size**-0.5 + mask_T1N
    sink_TH1 = sink_H.to(exact).view(1, -1, 1).expand(len(q_THd), -1, 1)
    weights = torch.softmax(torch.cat([logits_THN, sink_TH1], -1), -1)
    return (weights[..., :-1] @ keys_TNd).to(q_THd.dtype)


def _keys(rows: Located, row_format: str, size: int) -> tuple[Tensor, Tensor]:
    """Keys [T, N, d] and their mask [T, 1, N], 0 or -inf."""
    nbytes = size + size // 32 if row_format == "fp8" else size // 2 + size // 16
    live_TN = rows.at_TN >= 0
    steps = torch.arange(nbytes, device=rows.at_TN.device)
    packed = rows.memory[rows.at_TN.clamp(min=0).unsqueeze(-1) + steps]
    keys_TNd = unpack(packed, row_format, size).masked_fill(~live_TN.unsqueeze(-1), 0.0)
    mask_TN = torch.zeros_like(live_TN, dtype=torch.float32).masked_fill(~live_TN, -torch.inf)
    return keys_TNd, mask_TN.unsqueeze(1)


# ------------------------------------------------------------------ kernel

_NOTHING = tl.constexpr(-1.0e30)  # a logarithm of what has no weight, and still a number


@triton.jit
def _window_keys(memory, at_N, D: tl.constexpr, ALIGN: tl.constexpr):
    """Even and odd dims [N, D / 2] of FP8 rows."""
    live_N1 = (at_N >= 0)[:, None]
    row_N = memory + tl.multiple_of(tl.maximum(at_N, 0), ALIGN)
    words = tl.load(
        row_N.to(tl.pointer_type(tl.int16))[:, None] + tl.arange(0, D // 2)[None, :],
        mask=live_N1,
        other=0,
    )
    scales = tl.load((row_N + D)[:, None] + tl.arange(0, D // 32)[None, :], mask=live_N1, other=0)
    powers = power_of(tl.minimum(scales.to(tl.int32) - 127 + 120, 127))
    return fp8_halves(words, spread(powers, 16))


@triton.jit
def _selected_keys(memory, at_N, D: tl.constexpr, ALIGN: tl.constexpr):
    """The same of FP4 rows with an e4m3 scale per 16 dims, all times 2 ** -8."""
    live_N1 = (at_N >= 0)[:, None]
    row_N = memory + tl.multiple_of(tl.maximum(at_N, 0), ALIGN)
    codes = tl.load(row_N[:, None] + tl.arange(0, D // 2)[None, :], mask=live_N1, other=0)
    scales = tl.load(
        (row_N + D // 2)[:, None] + tl.arange(0, D // 16)[None, :], mask=live_N1, other=0
    )
    # a step is up to 448: with all of 2 ** 126 it would be too large for bf16
    steps = bf16(scales.to(tl.int32) << 4).to(tl.float32) * 2.0**120
    return fp4_halves(codes, spread((steps * 2.0**118).to(tl.bfloat16), 8))


@triton.jit
def _take_in(
    even, odd, q_even, q_odd, live_N, most_H, sum_H, out_even, out_odd, scale, LIFT: tl.constexpr
):
    """One tile of keys into the running softmax; logarithms to base 2.

    Keys are 2 ** LIFT times what stands in the tile.
    """
    even, odd = even.to(q_even.dtype), odd.to(q_even.dtype)
    logits_HN = tl.dot(q_even, tl.trans(even), input_precision="ieee")
    logits_HN = tl.dot(q_odd, tl.trans(odd), logits_HN, input_precision="ieee")
    logits_HN = tl.where(live_N[None, :], logits_HN * (scale * 2.0**LIFT), _NOTHING)
    new_H = tl.maximum(most_H, tl.max(logits_HN, 1))
    kept_H = tl.exp2(most_H - new_H)
    weights_HN = tl.where(live_N[None, :], tl.exp2(logits_HN - new_H[:, None]), 0.0)
    sum_H = sum_H * kept_H + tl.sum(weights_HN, 1)
    weights_HN = (weights_HN * 2.0**LIFT).to(even.dtype)
    out_even = tl.dot(weights_HN, even, out_even * kept_H[:, None], input_precision="ieee")
    out_odd = tl.dot(weights_HN, odd, out_odd * kept_H[:, None], input_precision="ieee")
    return new_H, sum_H, out_even, out_odd


@triton.jit
def _attend(
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
    heads,
    WINDOW: tl.constexpr,
    SELECTED: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    ALIGN8: tl.constexpr,
    ALIGN4: tl.constexpr,
):
    """Part s of row t; `out` is [T, S, H, d] and not divided by the sums if there are parts."""
    t, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = D // 2
    WINDOW_TILES: tl.constexpr = (WINDOW + TILE - 1) // TILE
    TILES: tl.constexpr = WINDOW_TILES + (SELECTED + TILE - 1) // TILE
    EACH: tl.constexpr = (TILES + PARTS - 1) // PARTS
    first = s * EACH
    stop = tl.minimum(first + EACH, TILES)

    h = tl.arange(0, H)
    pair = tl.arange(0, HALF)
    q_at = (t * heads + h)[:, None] * D + 2 * pair[None, :]
    own_H1 = (h < heads)[:, None]
    q_even = tl.load(q + q_at, mask=own_H1, other=0.0)
    q_odd = tl.load(q + q_at + 1, mask=own_H1, other=0.0)
    # the first part begins with the sink: it has weight and no value
    LOG2E: tl.constexpr = 1.4426950408889634
    begins = s == 0
    sink_H = tl.load(sink + h, mask=h < heads, other=0.0) * LOG2E
    most_H = tl.where(begins, sink_H, _NOTHING)
    sum_H = tl.zeros((H,), tl.float32) + begins.to(tl.float32)
    out_even = tl.zeros((H, HALF), tl.float32)
    out_odd = tl.zeros((H, HALF), tl.float32)

    n = tl.arange(0, TILE)
    for tile in range(first, tl.minimum(stop, WINDOW_TILES)):
        place_N = tile * TILE + n
        at_N = tl.load(window_at + t * WINDOW + place_N, mask=place_N < WINDOW, other=-1)
        even, odd = _window_keys(window, at_N, D, ALIGN8)
        most_H, sum_H, out_even, out_odd = _take_in(
            even, odd, q_even, q_odd, at_N >= 0, most_H, sum_H, out_even, out_odd, scale, 0
        )
    for tile in range(tl.maximum(first, WINDOW_TILES), stop):
        place_N = (tile - WINDOW_TILES) * TILE + n
        at_N = tl.load(selected_at + t * SELECTED + place_N, mask=place_N < SELECTED, other=-1)
        even, odd = _selected_keys(selected, at_N, D, ALIGN4)
        most_H, sum_H, out_even, out_odd = _take_in(
            even, odd, q_even, q_odd, at_N >= 0, most_H, sum_H, out_even, out_odd, scale, 8
        )

    part = (t * PARTS + s) * heads + h
    if PARTS == 1:
        out_even = out_even / sum_H[:, None]
        out_odd = out_odd / sum_H[:, None]
    else:
        tl.store(most + part, most_H, mask=h < heads)
        tl.store(sums + part, sum_H, mask=h < heads)
    out_at = part[:, None] * D + 2 * pair[None, :]
    kind = out.dtype.element_ty
    tl.store(out + out_at, out_even.to(kind), mask=own_H1)
    tl.store(out + out_at + 1, out_odd.to(kind), mask=own_H1)


@triton.jit
def _merge(
    parts, most, sums, out, heads, PARTS: tl.constexpr, D: tl.constexpr, PAIRED: tl.constexpr
):
    """One head of one row: the parts by their share of the whole softmax, in their order.

    PAIRED: the dims of every eight of a part stand in the order 0 4 1 5 2 6 3 7.
    """
    th = tl.program_id(0).to(tl.int64)
    t, h = th // heads, th % heads
    d = tl.arange(0, D)
    place = d // 8 * 8 + d % 4 * 2 + d % 8 // 4 if PAIRED else d
    largest = tl.full((), _NOTHING, tl.float32)
    for s in tl.static_range(PARTS):
        largest = tl.maximum(largest, tl.load(most + (t * PARTS + s) * heads + h))
    total = tl.zeros((), tl.float32)
    whole = tl.zeros((D,), tl.float32)
    for s in tl.static_range(PARTS):
        part = (t * PARTS + s) * heads + h
        share = tl.exp2(tl.load(most + part) - largest)
        total += share * tl.load(sums + part)
        whole += share * tl.load(parts + part * D + place)
    tl.store(out + th * D + d, (whole / total).to(out.dtype.element_ty))


# ------------------------------------------------------------------ launch


class Tiling(NamedTuple):
    """How the kernel for any GPU cuts the work; the one for Hopper has its own."""

    tile: int = 64  # keys
    warps: int = 8
    stages: int = 1


def packed_attention(
    q_THd: Tensor,
    window: Located,
    selected: Located | None,
    sink_H: Tensor,
    *,
    parts: int = 2,
    tiling: Tiling | None = None,
) -> Tensor:
    """[T, H, d] as the reference, up to the rounding of softmax weights to the dtype of q.

    q is bf16 or float32, d a power of two from 64 on. More `parts` are faster for few rows, one
    is for many. With a `tiling`, the kernel for any GPU. On a CPU the reference runs.
    """
    if not q_THd.is_cuda:
        return reference(q_THd, window, selected, sink_H)
    rows, heads, size = q_THd.shape
    assert size >= 64
    assert size & (size - 1) == 0
    out_THd = torch.empty_like(q_THd)
    if not rows:
        return out_THd
    chosen = selected or Located(window.memory, window.at_TN[:, :0])
    on_hopper = tiling is None and _fits_hopper(q_THd)
    tile = hopper.TILE if on_hopper else (tiling or Tiling()).tile
    tiles = -(-window.at_TN.shape[1] // tile) + -(-chosen.at_TN.shape[1] // tile)
    parts = -(-tiles // -(-tiles // min(parts, tiles)))  # none of them empty
    if parts > 1:
        shape = (rows, parts, heads)
        sums = q_THd.new_empty(2, *shape, dtype=torch.float32)
        partial = q_THd.new_empty(*shape, size, dtype=torch.float32)
    else:
        sums, partial = sink_H.new_empty(2, 1), out_THd
    tensors = (
        q_THd.contiguous(),
        window.memory,
        window.at_TN.contiguous(),
        chosen.memory,
        chosen.at_TN.contiguous(),
        sink_H,
        partial,
        sums[0],
        sums[1],
        size**-0.5 * 1.4426950408889634,
    )
    lists = {"WINDOW": window.at_TN.shape[1], "SELECTED": chosen.at_TN.shape[1], "PARTS": parts}
    if on_hopper:
        hopper.attend[(rows, parts)](*tensors, **lists, num_warps=hopper.WARPS)
    else:
        _, warps, stages = tiling or Tiling()
        _attend[(rows, parts)](
            *tensors,
            heads,
            **lists,
            TILE=tile,
            H=max(16, triton.next_power_of_2(heads)),
            D=size,
            ALIGN8=_alignment(size + size // 32),
            ALIGN4=_alignment(size // 2 + size // 16),
            num_warps=warps,
            num_stages=stages,
        )
    if parts > 1:
        _merge[(rows * heads,)](
            partial,
            sums[0],
            sums[1],
            out_THd,
            heads,
            PARTS=parts,
            D=size,
            PAIRED=on_hopper,
            num_warps=4,
        )
    return out_THd


def _fits_hopper(q_THd: Tensor) -> bool:
    if q_THd.dtype != torch.bfloat16 or q_THd.shape[1:] != (hopper.HEADS, hopper.SIZE):
        return False
    return torch.cuda.get_device_capability(q_THd.device)[0] == 9


def _alignment(row_bytes: int) -> int:
    return min(16, row_bytes & -row_bytes)
