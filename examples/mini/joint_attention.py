"""Joint attention of packed rows: window, compressed rows and sink in one softmax.

One key (and value) serves all heads, so a tile is some positions times all heads. Forward and
backward as Triton kernels on a GPU, and a plain reference that a test holds them to.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# B = rows, S = positions, H = heads, d = head size, W = window, J = compressed rows

TOKENS = 32  # positions of a tile
KEYS = 64  # keys met at once


@dataclass(frozen=True)
class Bounds:
    """Per position: where its document begins and ends, and the first window position it sees."""

    starts_BS: Tensor  # int32
    ends_BS: Tensor
    floors_BS: Tensor

    @classmethod
    def of(cls, starts_BS: Tensor, floors_BS: Tensor) -> Bounds:
        length = starts_BS.shape[1]
        positions = torch.arange(length, device=starts_BS.device)
        begins = torch.where(starts_BS == positions, positions, length)
        following = torch.cat([begins[:, 1:], torch.full_like(begins[:, :1], length)], 1)
        ends = following.flip(1).cummin(1).values.flip(1)
        return cls(starts_BS.int(), ends.int(), torch.maximum(starts_BS, floors_BS).int())


def joint_attention(
    q_BSHd: Tensor,
    window_BSd: Tensor,
    rows_BJd: Tensor | None,
    sink_H: Tensor,
    bounds: Bounds,
    chosen_BSJ: Tensor | None,
    window: int,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    """[B, S, H, d], and the logarithm of each softmax's denominator [B, S, H].

    `chosen` int8 is zero where a row is not attended to; None attends to all visible rows.
    """
    if q_BSHd.is_cuda or INTERPRETED:
        rows = window_BSd[:, :0] if rows_BJd is None else rows_BJd
        out, lse = _Joint.apply(q_BSHd, window_BSd, rows, sink_H, bounds, chosen_BSJ, window, ratio)
        return out, lse
    return reference(q_BSHd, window_BSd, rows_BJd, sink_H, bounds, chosen_BSJ, window, ratio)


INTERPRETED = False
"""Tests set it, to run the kernels in Triton's interpreter."""


def reference(
    q_BSHd: Tensor,
    window_BSd: Tensor,
    rows_BJd: Tensor | None,
    sink_H: Tensor,
    bounds: Bounds,
    chosen_BSJ: Tensor | None,
    window: int,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    positions = torch.arange(q_BSHd.shape[1], device=q_BSHd.device)
    near = (positions <= positions[:, None]) & (positions > positions[:, None] - window)
    masks, keys = [near & (positions >= bounds.floors_BS.unsqueeze(2))], [window_BSd]
    if rows_BJd is not None and rows_BJd.shape[1]:
        masks.append(visible(bounds, rows_BJd.shape[1], ratio))
        if chosen_BSJ is not None:
            masks[-1] = masks[-1] & (chosen_BSJ != 0)
        keys.append(rows_BJd)
    mask, key = torch.cat(masks, 2), torch.cat(keys, 1)
    logits = torch.einsum("bshd,bkd->bshk", q_BSHd, key).float() * q_BSHd.shape[-1] ** -0.5
    logits = logits.masked_fill(~mask.unsqueeze(2), -torch.inf)
    sink = sink_H.view(1, 1, -1, 1).expand(*logits.shape[:3], 1)
    lse = torch.cat([logits, sink], -1).logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp().to(key.dtype)
    return torch.einsum("bshk,bkd->bshd", weights, key), lse


def visible(
    bounds: Bounds, count: int, ratio: int, first: int = 0, end: int | None = None
) -> Tensor:
    """bool [B, positions first .. end, count]: rows that are complete, of the same document."""
    positions = torch.arange(bounds.starts_BS.shape[1], device=bounds.starts_BS.device)
    rows = torch.arange(count, device=positions.device)
    whole = (rows + 1) * ratio - 1 <= positions[first:end, None]
    return whole & (rows * ratio >= bounds.starts_BS[:, first:end].unsqueeze(2))


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        window_keys: Tensor,
        rows: Tensor,
        sink: Tensor,
        bounds: Bounds,
        chosen: Tensor | None,
        window: int,
        ratio: int,
    ) -> tuple[Tensor, Tensor]:
        q, window_keys, rows = q.contiguous(), window_keys.contiguous(), rows.contiguous()
        batch, length, heads, _ = q.shape
        out = torch.empty_like(q)
        lse = torch.empty(batch, length, heads, device=q.device, dtype=torch.float32)
        shape = _shape(q, rows, chosen, window, ratio)
        _forward[(length // TOKENS, batch)](
            q, window_keys, rows, sink.float(), bounds.starts_BS, bounds.floors_BS,
            rows if chosen is None else chosen, out, lse, **shape,
        )  # fmt: skip
        ctx.save_for_backward(q, window_keys, rows, sink, chosen, out, lse)
        ctx.bounds, ctx.shape = bounds, shape
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, window_keys, rows, sink, chosen, out, lse = ctx.saved_tensors
        bounds, shape, grad = ctx.bounds, ctx.shape, grad.contiguous()
        batch, length = q.shape[:2]
        delta = (out.float() * grad.float()).sum(-1)
        grad_sink = -((sink.float() - lse).exp() * delta).sum((0, 1))
        dq = torch.empty_like(q)
        dwindow = torch.empty_like(window_keys)
        drows = torch.empty_like(rows)
        mask = rows if chosen is None else chosen
        common = (
            q, window_keys, rows, bounds.starts_BS, bounds.ends_BS, bounds.floors_BS, mask, grad,
            lse, delta,
        )  # fmt: skip
        _backward_queries[(length // TOKENS, batch)](*common, dq, **shape)
        _backward_window[(length // TOKENS, batch)](*common, dwindow, **shape)
        if rows.shape[1]:
            _backward_rows[(rows.shape[1] // KEYS, batch)](*common, drows, **shape)
        return dq, dwindow, drows, grad_sink, None, None, None, None


def _shape(
    q: Tensor, rows: Tensor, chosen: Tensor | None, window: int, ratio: int
) -> dict[str, Any]:
    _, length, heads, size = q.shape
    if length % KEYS or window % TOKENS or rows.shape[1] % KEYS:
        raise ValueError(f"{length} positions are not whole tiles of {KEYS}")
    return {
        "length": length,
        "count": rows.shape[1],
        "scale": size**-0.5,
        "H": heads,
        "D": size,
        "W": window,
        "R": max(ratio, 1),
        "CHOSEN": chosen is not None,
        "M": TOKENS * heads,
        "T": TOKENS,
        "N": KEYS,
        "num_warps": 8,
        "num_stages": 2,
    }


@triton.jit
def _forward(
    q_ptr, window_ptr, rows_ptr, sink_ptr, start_ptr, floor_ptr, chosen_ptr, out_ptr, lse_ptr,
    length, count, scale,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, CHOSEN: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * T
    row = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, M)
    token = first + m // H
    d = tl.arange(0, D)
    at = row * length * H + first * H + m  # of this tile's queries, position by position
    q = tl.load(q_ptr + at[:, None] * D + d[None, :])
    start = tl.load(start_ptr + row * length + token)
    floor = tl.load(floor_ptr + row * length + token)
    top = tl.load(sink_ptr + m % H)
    total = tl.full([M], 1.0, tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for begin in range(first - W, first + T, T):
        key = begin + tl.arange(0, T)
        k = tl.load(
            window_ptr + (row * length + key[:, None]) * D + d[None, :],
            mask=key[:, None] >= 0, other=0.0,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k)) * scale
        seen = (key[None, :] <= token[:, None]) & (key[None, :] > token[:, None] - W)
        seen = seen & (key[None, :] >= floor[:, None]) & (key[None, :] >= 0)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        fade = tl.exp(top - new)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(k.dtype), k)
        top = new
    low = tl.min(start) // R // N * N
    high = tl.minimum((first + T) // R, count)
    for begin in range(low, high, N):
        key = begin + tl.arange(0, N)
        k = tl.load(rows_ptr + (row * count + key[:, None]) * D + d[None, :])
        s = tl.dot(q, tl.trans(k)) * scale
        seen = (key[None, :] * R + R - 1 <= token[:, None]) & (key[None, :] * R >= start[:, None])
        if CHOSEN:
            place = (row * length + token[:, None]) * count + key[None, :]
            seen = seen & (tl.load(chosen_ptr + place) != 0)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        fade = tl.exp(top - new)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(k.dtype), k)
        top = new
    out = acc / total[:, None]
    tl.store(out_ptr + at[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + at, top + tl.log(total))


@triton.jit
def _backward_queries(
    q_ptr, window_ptr, rows_ptr, start_ptr, end_ptr, floor_ptr, chosen_ptr, grad_ptr, lse_ptr,
    delta_ptr, dq_ptr, length, count, scale,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, CHOSEN: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * T
    row = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, M)
    token = first + m // H
    d = tl.arange(0, D)
    at = row * length * H + first * H + m
    q = tl.load(q_ptr + at[:, None] * D + d[None, :])
    grad = tl.load(grad_ptr + at[:, None] * D + d[None, :])
    lse = tl.load(lse_ptr + at)
    delta = tl.load(delta_ptr + at)
    start = tl.load(start_ptr + row * length + token)
    floor = tl.load(floor_ptr + row * length + token)
    dq = tl.zeros([M, D], tl.float32)
    for begin in range(first - W, first + T, T):
        key = begin + tl.arange(0, T)
        k = tl.load(
            window_ptr + (row * length + key[:, None]) * D + d[None, :],
            mask=key[:, None] >= 0, other=0.0,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k)) * scale
        seen = (key[None, :] <= token[:, None]) & (key[None, :] > token[:, None] - W)
        seen = seen & (key[None, :] >= floor[:, None]) & (key[None, :] >= 0)
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        ds = p * (tl.dot(grad, tl.trans(k)) - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    low = tl.min(start) // R // N * N
    high = tl.minimum((first + T) // R, count)
    for begin in range(low, high, N):
        key = begin + tl.arange(0, N)
        k = tl.load(rows_ptr + (row * count + key[:, None]) * D + d[None, :])
        s = tl.dot(q, tl.trans(k)) * scale
        seen = (key[None, :] * R + R - 1 <= token[:, None]) & (key[None, :] * R >= start[:, None])
        if CHOSEN:
            place = (row * length + token[:, None]) * count + key[None, :]
            seen = seen & (tl.load(chosen_ptr + place) != 0)
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        ds = p * (tl.dot(grad, tl.trans(k)) - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    tl.store(dq_ptr + at[:, None] * D + d[None, :], (dq * scale).to(dq_ptr.dtype.element_ty))


@triton.jit
def _backward_window(
    q_ptr, window_ptr, rows_ptr, start_ptr, end_ptr, floor_ptr, chosen_ptr, grad_ptr, lse_ptr,
    delta_ptr, dkey_ptr, length, count, scale,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, CHOSEN: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * T
    row = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    key = begin + tl.arange(0, T)
    place = (row * length + key[:, None]) * D + d[None, :]
    k = tl.load(window_ptr + place)
    dkey = tl.zeros([T, D], tl.float32)
    for first in range(begin, tl.minimum(begin + T + W, length), T):
        token = first + m // H
        at = row * length * H + first * H + m
        q = tl.load(q_ptr + at[:, None] * D + d[None, :])
        grad = tl.load(grad_ptr + at[:, None] * D + d[None, :])
        lse = tl.load(lse_ptr + at)
        delta = tl.load(delta_ptr + at)
        floor = tl.load(floor_ptr + row * length + token)
        s = tl.dot(q, tl.trans(k)) * scale
        seen = (key[None, :] <= token[:, None]) & (key[None, :] > token[:, None] - W)
        seen = seen & (key[None, :] >= floor[:, None])
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        ds = p * (tl.dot(grad, tl.trans(k)) - delta[:, None]) * scale
        dkey += tl.dot(tl.trans(p.to(k.dtype)), grad)
        dkey += tl.dot(tl.trans(ds.to(k.dtype)), q)
    tl.store(dkey_ptr + place, dkey.to(dkey_ptr.dtype.element_ty))


@triton.jit
def _backward_rows(
    q_ptr, window_ptr, rows_ptr, start_ptr, end_ptr, floor_ptr, chosen_ptr, grad_ptr, lse_ptr,
    delta_ptr, dkey_ptr, length, count, scale,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, CHOSEN: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * N
    row = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    key = begin + tl.arange(0, N)
    where = (row * count + key[:, None]) * D + d[None, :]
    k = tl.load(rows_ptr + where)
    dkey = tl.zeros([N, D], tl.float32)
    last = tl.minimum((begin + N) * R, length) - 1
    end = tl.load(end_ptr + row * length + last)
    for first in range(begin * R // T * T, end, T):
        token = first + m // H
        at = row * length * H + first * H + m
        q = tl.load(q_ptr + at[:, None] * D + d[None, :])
        grad = tl.load(grad_ptr + at[:, None] * D + d[None, :])
        lse = tl.load(lse_ptr + at)
        delta = tl.load(delta_ptr + at)
        start = tl.load(start_ptr + row * length + token)
        s = tl.dot(q, tl.trans(k)) * scale
        seen = (key[None, :] * R + R - 1 <= token[:, None]) & (key[None, :] * R >= start[:, None])
        if CHOSEN:
            place = (row * length + token[:, None]) * count + key[None, :]
            seen = seen & (tl.load(chosen_ptr + place) != 0)
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        ds = p * (tl.dot(grad, tl.trans(k)) - delta[:, None]) * scale
        dkey += tl.dot(tl.trans(p.to(k.dtype)), grad)
        dkey += tl.dot(tl.trans(ds.to(k.dtype)), q)
    tl.store(dkey_ptr + where, dkey.to(dkey_ptr.dtype.element_ty))
