"""How a sublayer begins: the weights it mixes streams by, and its normed input, in two launches.

The steps of hyper_connection.py and norm_rows.py, joined; on a CPU they run one after another.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.hyper_connection_kernels import partial_logits
from kernels.ops.hyper_connection import Mixes, mixes, mixing_logits
from kernels.ops.norm_rows import Normed, collapse_reference
from kernels.triton_quantise import fp8_rounded

# T = rows, n = streams, D = hidden size, E = n * D, m = 2 n + n * n mixing weights


class Mixing(NamedTuple):
    """What turns streams into mixing weights; float32 where streams are narrower."""

    project_Em: Tensor  # holds the scales already
    base_m: Tensor
    iterations: int
    eps: float


class Begun(NamedTuple):
    mixes: Mixes
    x: Normed


def reference(
    streams_TnD: Tensor,
    pre_Tn: Tensor,
    mixing: Mixing,
    weight_D: Tensor,
    eps: float,
    *,
    fp8: bool = False,
) -> Begun:
    """The streams' mixing weights, and the norm of their sum, each times its `pre`.

    `pre` came with the mixing weights of the sublayer before. `eps` is that of the norms.
    """
    project_Em, base_m, iterations, mixing_eps = mixing
    logits_Tm = mixing_logits(
        streams_TnD.to(project_Em.dtype), project_Em, base_m, torch.full_like(base_m[0], eps)
    )
    made = mixes(logits_Tm, streams_TnD.shape[1], iterations, mixing_eps)
    return Begun(made, collapse_reference(streams_TnD, pre_Tn, weight_D, eps, fp8=fp8))


# ------------------------------------------------------------------ kernel


@triton.jit
def _entries(partial, base, factor, first, rows, t, s, live, COUNT: tl.constexpr, WIDE):
    """Logits first .. first + COUNT of row t, added up over all pieces."""
    n = first + tl.arange(0, COUNT)
    tile = tl.load(
        partial + (s * rows + t)[:, None] * WIDE + n[None, :], mask=live[:, None], other=0.0
    )
    return tl.sum(tile, 0) * factor + tl.load(base + n)


@triton.jit
def _begin(
    streams,
    partial,
    squares,
    base,
    pre_in,
    weight,
    pre,
    post,
    mix,
    plain,
    rounded,
    rows,
    eps,
    mixing_eps,
    N: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    PIECES: tl.constexpr,
    ITERATIONS: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    """Row t: S and BLOCK are powers of two that hold the pieces and the width."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    values = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(N):
        stream = tl.load(streams + (t * N + i) * D + d, mask=inside, other=0.0)
        values += tl.load(pre_in + t * N + i) * stream.to(tl.float32)

    s = tl.arange(0, S)
    live = s < PIECES
    square = tl.sum(tl.load(squares + s * rows + t, mask=live, other=0.0), 0)
    factor = tl.rsqrt(square / (N * D) + eps)
    n = tl.arange(0, N)
    opened = _entries(partial, base, factor, 0, rows, t, s, live, N, WIDE)
    tl.store(pre + t * N + n, 1 / (1 + tl.exp(-opened)) + mixing_eps)
    closed = _entries(partial, base, factor, N, rows, t, s, live, N, WIDE)
    tl.store(post + t * N + n, 2 / (1 + tl.exp(-closed)))
    logits = _entries(partial, base, factor, 2 * N, rows, t, s, live, N * N, WIDE)
    square_NN = tl.reshape(logits, (N, N))  # source, destination
    square_NN = tl.exp(square_NN - tl.max(square_NN, 1)[:, None])
    square_NN = square_NN / tl.sum(square_NN, 1)[:, None] + mixing_eps
    square_NN = square_NN / (tl.sum(square_NN, 0)[None, :] + mixing_eps)
    for _ in range(ITERATIONS - 1):
        square_NN = square_NN / (tl.sum(square_NN, 1)[:, None] + mixing_eps)
        square_NN = square_NN / (tl.sum(square_NN, 0)[None, :] + mixing_eps)
    tl.store(mix + t * N * N + tl.arange(0, N * N), tl.reshape(square_NN, (N * N,)))

    values = values.to(rounded.dtype.element_ty).to(tl.float32)
    length = tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    values = (values * length * scale).to(rounded.dtype.element_ty)
    if FP8:
        tl.store(plain + t * D + d, values, mask=inside)
        groups = tl.reshape(values.to(tl.float32), (BLOCK // 32, 32))
        values = tl.reshape(fp8_rounded(groups), (BLOCK,)).to(rounded.dtype.element_ty)
    tl.store(rounded + t * D + d, values, mask=inside)


# ------------------------------------------------------------------ launch


def begin_sublayer(
    streams_TnD: Tensor,
    pre_Tn: Tensor,
    mixing: Mixing,
    weight_D: Tensor,
    eps: float,
    *,
    fp8: bool = False,
) -> Begun:
    """As the reference, up to the order of sums. Streams are contiguous, n is a power of two."""
    if not streams_TnD.is_cuda:
        return reference(streams_TnD, pre_Tn, mixing, weight_D, eps, fp8=fp8)
    assert streams_TnD.is_contiguous()
    rows, streams, width = streams_TnD.shape
    pre, post = pre_Tn.new_empty(2, rows, streams)
    made = Mixes(pre, post, pre_Tn.new_empty(rows, streams, streams))
    rounded_TD = streams_TnD.new_empty(rows, width)
    plain_TD = torch.empty_like(rounded_TD) if fp8 else rounded_TD
    if rows:
        partial, squares = partial_logits(streams_TnD, mixing.project_Em, _piece(rows))
        pieces, _, wide = partial.shape
        block = max(32, triton.next_power_of_2(width))
        _begin[(rows,)](
            streams_TnD,
            partial,
            squares,
            mixing.base_m,
            pre_Tn.contiguous(),
            weight_D,
            *made,
            plain_TD,
            rounded_TD,
            rows,
            eps,
            mixing.eps,
            N=streams,
            D=width,
            WIDE=wide,
            PIECES=pieces,
            ITERATIONS=mixing.iterations,
            S=triton.next_power_of_2(pieces),
            BLOCK=block,
            FP8=fp8,
            num_warps=min(8, max(1, block // 256)),
        )
    return Begun(made, Normed(plain_TD, rounded_TD))


def _piece(rows: int) -> int:
    """Values of the streams that one program multiplies: few rows need many programs to fill a
    GPU, many rows would have many partial sums to write. All decode steps have the same.
    """
    return 128 if rows <= 256 else 512
