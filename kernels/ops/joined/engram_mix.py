"""Engram's memory taken into the streams: each stream's gate, and what it lets in, in one pass."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.engram import engram_gates

# T = rows, n = streams, D = hidden size, X = (n + 1) * D: a key for each stream, then one value


def reference(
    streams_TnD: Tensor, memory_TX: Tensor, weight_nD: Tensor, eps: float, closed_T: Tensor
) -> Tensor:
    """[T, n, D]: streams plus gate * value, the gate 0 where `closed`.

    `weight` is the product of the norms' weights of streams and keys. Computed in float32 if the
    dtype of the streams is narrower, and rounded once.
    """
    exact = torch.promote_types(streams_TnD.dtype, torch.float32)
    rows, streams, size = streams_TnD.shape
    wide_TnD, memory = streams_TnD.to(exact), memory_TX.to(exact).view(rows, streams + 1, size)
    eps_ = torch.full((), eps, dtype=exact, device=streams_TnD.device)
    gates_Tn = engram_gates(wide_TnD, memory[:, :-1], weight_nD.to(exact), eps_)
    gates_Tn1 = gates_Tn.masked_fill(closed_T.unsqueeze(1), 0.0).unsqueeze(2)
    return torch.addcmul(wide_TnD, gates_Tn1, memory[:, -1:]).to(streams_TnD.dtype)


@triton.jit
def _engram_mix(
    streams,
    memory,
    weight,
    closed,
    out,
    eps,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stream i of row t."""
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    row = memory + t * (STREAMS + 1) * D + d
    stream = tl.load(streams + (t * STREAMS + i) * D + d, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(row + i * D, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + i * D + d, mask=inside, other=0.0).to(tl.float32)
    match = tl.sum(stream * scale * key, 0)
    match *= tl.rsqrt(tl.sum(stream * stream, 0) / D + eps)
    match *= tl.rsqrt(tl.sum(key * key, 0) / D + eps)
    match *= D**-0.5
    root = tl.sqrt(tl.maximum(tl.abs(match), 1e-6))
    root = tl.where(match > 0, root, tl.where(match < 0, -root, 0.0))
    gate = tl.where(tl.load(closed + t) != 0, 0.0, 1 / (1 + tl.exp(-root)))
    value = tl.load(row + STREAMS * D, mask=inside, other=0.0).to(tl.float32)
    total = (stream + gate * value).to(out.dtype.element_ty)
    tl.store(out + (t * STREAMS + i) * D + d, total, mask=inside)


def engram_mix(
    streams_TnD: Tensor, memory_TX: Tensor, weight_nD: Tensor, eps: float, closed_T: Tensor
) -> Tensor:
    """As the reference, up to the order of sums. On a CPU the reference runs."""
    if not streams_TnD.is_cuda:
        return reference(streams_TnD, memory_TX, weight_nD, eps, closed_T)
    rows, streams, width = streams_TnD.shape
    out_TnD = torch.empty_like(streams_TnD, memory_format=torch.contiguous_format)
    if rows:
        block = triton.next_power_of_2(width)
        _engram_mix[(rows, streams)](
            streams_TnD.contiguous(),
            memory_TX.contiguous(),
            weight_nD,
            closed_T,
            out_TnD,
            eps,
            STREAMS=streams,
            D=width,
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
        )
    return out_TnD
