"""Hyper-connections on a GPU: each step reads and writes every stream once, in few launches.

The forms that kernels/ops/hyper_connection.py runs on CUDA tensors; its functions say what each
computes. Sums run over the same pieces in the same order in any batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.hyper_connection import Mixes

# T = rows, n = streams, D = hidden size, E = n * D, m = 2 n + n * n mixing weights of a sublayer


@triton.jit
def _logits(
    streams,
    project,
    partial,
    squares,
    rows,
    E: tl.constexpr,
    M: tl.constexpr,
    WIDE: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Piece s of the products and of the sums of squares of ROWS rows."""
    s = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (t < rows)[:, None]
    m = tl.arange(0, WIDE)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for first in range(s * PIECE, (s + 1) * PIECE, STEP):
        e = first + tl.arange(0, STEP)
        inside = e < E
        at = t[:, None] * E + e[None, :]
        loaded = tl.load(streams + at, mask=live & inside[None, :], other=0.0)
        values = loaded.to(tl.float32)
        weights = tl.load(
            project + e[:, None] * M + m[None, :],
            mask=inside[:, None] & (m < M)[None, :],
            other=0.0,
        )
        square += tl.sum(values * values, 1)
        if loaded.dtype == tl.bfloat16:
            # weights in three pieces of 8 bits: every product is exact
            high = weights.to(tl.bfloat16)
            weights -= high.to(tl.float32)
            middle = weights.to(tl.bfloat16)
            low = (weights - middle.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(loaded, low, total)
            total = tl.dot(loaded, middle, total)
            total = tl.dot(loaded, high, total)
        else:
            total = tl.dot(values, weights, total, input_precision="tf32x3")
    tl.store(partial + (s * rows + t)[:, None] * WIDE + m[None, :], total, mask=live)
    tl.store(squares + s * rows + t, square, mask=t < rows)


@triton.jit
def _finish(
    partial,
    squares,
    base,
    eps,
    logits,
    rows,
    E: tl.constexpr,
    M: tl.constexpr,
    WIDE: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = t < rows
    m = tl.arange(0, WIDE)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for s in range(PIECES):
        here = s * rows + t
        square += tl.load(squares + here, mask=live, other=0.0)
        total += tl.load(partial + here[:, None] * WIDE + m[None, :], mask=live[:, None], other=0.0)
    mean = square / E + tl.load(eps)
    inside = (m < M)[None, :]
    total = total * tl.rsqrt(mean)[:, None] + tl.load(base + m, mask=m < M, other=0.0)[None, :]
    tl.store(logits + t[:, None] * M + m[None, :], total, mask=live[:, None] & inside)


_PIECE = 512  # of E, that one program takes


def partial_logits(streams_TnD: Tensor, project_Em: Tensor, piece: int) -> tuple[Tensor, Tensor]:
    """Products [pieces, T, wide] and sums of squares [pieces, T] of pieces of the streams, each of
    `piece` values, a multiple of 64.
    """
    rows, flat = len(streams_TnD), streams_TnD.shape[1] * streams_TnD.shape[2]
    entries = project_Em.shape[1]
    wide, pieces = max(16, triton.next_power_of_2(entries)), triton.cdiv(flat, piece)
    partial = project_Em.new_empty(pieces, rows, wide)
    squares = project_Em.new_empty(pieces, rows)
    _logits[(pieces, triton.cdiv(rows, 64))](
        streams_TnD.contiguous(),
        project_Em.contiguous(),
        partial,
        squares,
        rows,
        E=flat,
        M=entries,
        WIDE=wide,
        PIECE=piece,
        ROWS=64,
        STEP=64,
        num_warps=4,
        num_stages=3,
    )
    return partial, squares


def mixing_logits(streams_TnD: Tensor, project_Em: Tensor, base_m: Tensor, eps: Tensor) -> Tensor:
    rows, entries = len(streams_TnD), project_Em.shape[1]
    logits_Tm = base_m.new_empty(rows, entries)
    if not rows:
        return logits_Tm
    partial, squares = partial_logits(streams_TnD, project_Em, _PIECE)
    _finish[(triton.cdiv(rows, 8),)](
        partial,
        squares,
        base_m,
        eps,
        logits_Tm,
        rows,
        E=streams_TnD.shape[1] * streams_TnD.shape[2],
        M=entries,
        WIDE=partial.shape[2],
        PIECES=len(partial),
        ROWS=8,
        num_warps=4,
    )
    return logits_Tm


@triton.jit
def _collapse(streams, pre, out, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(N):
        stream = tl.load(streams + (t * N + i) * D + d, mask=inside, other=0.0)
        total += tl.load(pre + t * N + i) * stream.to(tl.float32)
    tl.store(out + t * D + d, total.to(out.dtype.element_ty), mask=inside)


def collapse(streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
    rows, streams, width = streams_TnD.shape
    out_TD = streams_TnD.new_empty(rows, width)
    if not rows:
        return out_TD
    _collapse[(rows, triton.cdiv(width, 1024))](
        streams_TnD.contiguous(), pre_Tn.contiguous(), out_TD, N=streams, D=width, BLOCK=1024
    )
    return out_TD


@triton.jit
def _spread(
    added,
    more,
    streams,
    post,
    mix,
    out,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    MORE: tl.constexpr = False,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    new = tl.load(added + t * D + d, mask=inside, other=0.0).to(tl.float32)
    if MORE:
        new += tl.load(more + t * D + d, mask=inside, other=0.0).to(tl.float32)
    for to in tl.static_range(N):
        total = tl.load(post + t * N + to) * new
        for source in tl.static_range(N):
            # a stream is read from memory once: the other times it comes from the cache
            stream = tl.load(streams + (t * N + source) * D + d, mask=inside, other=0.0)
            total += tl.load(mix + (t * N + source) * N + to) * stream.to(tl.float32)
        tl.store(out + (t * N + to) * D + d, total.to(out.dtype.element_ty), mask=inside)


def spread(
    out_TD: Tensor,
    streams_TnD: Tensor,
    post_Tn: Tensor,
    mix_Tnn: Tensor,
    more_TD: Tensor | None = None,
) -> Tensor:
    rows, streams, width = streams_TnD.shape
    mixed_TnD = torch.empty_like(streams_TnD, memory_format=torch.contiguous_format)
    if not rows:
        return mixed_TnD
    _spread[(rows, triton.cdiv(width, 1024))](
        out_TD.contiguous(),
        out_TD if more_TD is None else more_TD.contiguous(),
        streams_TnD.contiguous(),
        post_Tn.contiguous(),
        mix_Tnn.contiguous(),
        mixed_TnD,
        N=streams,
        D=width,
        BLOCK=1024,
        MORE=more_TD is not None,
    )
    return mixed_TnD


@triton.jit
def _mixes(
    logits,
    pre,
    post,
    mix,
    rows,
    eps,
    N: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sigmoids and Sinkhorn's steps of ROWS rows, in registers."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = t < rows
    M: tl.constexpr = 2 * N + N * N
    n = tl.arange(0, N)
    gate_at = t[:, None] * M + n[None, :]
    opened = tl.load(logits + gate_at, mask=live[:, None], other=0.0)
    closed = tl.load(logits + gate_at + N, mask=live[:, None], other=0.0)
    to = t[:, None] * N + n[None, :]
    tl.store(pre + to, 1 / (1 + tl.exp(-opened)) + eps, mask=live[:, None])
    tl.store(post + to, 2 / (1 + tl.exp(-closed)), mask=live[:, None])
    entry = n[:, None] * N + n[None, :]
    at = t[:, None, None] * M + 2 * N + entry[None, :, :]
    values = tl.load(logits + at, mask=live[:, None, None], other=0.0)
    values = tl.exp(values - tl.max(values, 2)[:, :, None])
    values = values / tl.sum(values, 2)[:, :, None] + eps
    values = values / (tl.sum(values, 1)[:, None, :] + eps)
    for _ in range(ITERATIONS - 1):
        values = values / (tl.sum(values, 2)[:, :, None] + eps)
        values = values / (tl.sum(values, 1)[:, None, :] + eps)
    tl.store(mix + t[:, None, None] * (N * N) + entry[None, :, :], values, mask=live[:, None, None])


def mixes(logits_Tm: Tensor, n: int, iterations: int, eps: float) -> Mixes:
    rows = len(logits_Tm)
    pre_Tn, post_Tn = logits_Tm.new_empty(2, rows, n)
    mix_Tnn = logits_Tm.new_empty(rows, n, n)
    if rows:
        _mixes[(triton.cdiv(rows, 32),)](
            logits_Tm.contiguous(),
            pre_Tn,
            post_Tn,
            mix_Tnn,
            rows,
            eps,
            N=n,
            ITERATIONS=iterations,
            ROWS=32,
            num_warps=1,
        )
    return Mixes(pre_Tn, post_Tn, mix_Tnn)
