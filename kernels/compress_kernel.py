"""The compressor's pooling on a GPU: kernels/ops/compress.py says what it computes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# N = groups, d = head size


@triton.jit
def _pool(first_kv, first_gate, kv, gate, out, first_stride, stride, D, COUNT, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < COUNT
    one, other = i // D * first_stride + i % D, i // D * stride + i % D
    difference = tl.load(gate + other, mask=inside, other=0.0).to(tl.float32)
    difference -= tl.load(first_gate + one, mask=inside, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-difference))
    value = (1 - share) * tl.load(first_kv + one, mask=inside, other=0.0).to(tl.float32)
    value += share * tl.load(kv + other, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)


def compress(first_kv_Nd: Tensor, first_gate_Nd: Tensor, kv_Nd: Tensor, gate_Nd: Tensor) -> Tensor:
    """Values and gates of one position may be two halves of one tensor's rows."""
    out_Nd = torch.empty(kv_Nd.shape, dtype=kv_Nd.dtype, device=kv_Nd.device)
    count = out_Nd.numel()
    if not count:
        return out_Nd
    assert first_kv_Nd.stride() == first_gate_Nd.stride()
    assert kv_Nd.stride() == gate_Nd.stride()
    _pool[(triton.cdiv(count, 2048),)](
        first_kv_Nd,
        first_gate_Nd,
        kv_Nd,
        gate_Nd,
        out_Nd,
        first_kv_Nd.stride(0),
        kv_Nd.stride(0),
        kv_Nd.shape[1],
        count,
        BLOCK=2048,
    )
    return out_Nd
