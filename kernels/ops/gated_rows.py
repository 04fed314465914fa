"""The activation of a gated MLP, and its result as the next FP8 product reads it, in one pass."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats import fake_quant
from kernels.triton_quantise import fp8_rounded

# T = rows, F = intermediate size, a multiple of 32 where rounded; G = 2 F: gate, then up


def reference(gate_up_TG: Tensor, limit: float, *, fp8: bool = False) -> Tensor:
    """silu(gate) * up [T, F], computed in float32 if the dtype is narrower.

    The gate is clamped from above, the other factor from both sides, by `limit`.
    """
    wide = gate_up_TG.to(torch.promote_types(gate_up_TG.dtype, torch.float32))
    gate_TF, up_TF = wide.chunk(2, -1)
    hidden_TF = torch.nn.functional.silu(gate_TF.clamp(max=limit)) * up_TF.clamp(-limit, limit)
    hidden_TF = hidden_TF.to(gate_up_TG.dtype)
    return fake_quant(hidden_TF, "fp8") if fp8 else hidden_TF


@triton.jit
def _gated(gate_up, out, limit, F: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    gate = tl.load(gate_up + t * 2 * F + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * 2 * F + F + f, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    hidden = (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    if FP8:
        groups = tl.reshape(hidden.to(tl.float32), (BLOCK // 32, 32))
        hidden = tl.reshape(fp8_rounded(groups), (BLOCK,)).to(out.dtype.element_ty)
    tl.store(out + t * F + f, hidden, mask=inside)


def gated_rows(gate_up_TG: Tensor, limit: float, *, fp8: bool = False) -> Tensor:
    """As the reference, up to the last bit of an exponential."""
    if not gate_up_TG.is_cuda:
        return reference(gate_up_TG, limit, fp8=fp8)
    rows, inner = len(gate_up_TG), gate_up_TG.shape[1] // 2
    out_TF = gate_up_TG.new_empty(rows, inner)
    if rows:
        block = min(1024, max(32, triton.next_power_of_2(inner)))
        _gated[(rows, triton.cdiv(inner, block))](
            gate_up_TG.contiguous(), out_TF, limit, F=inner, BLOCK=block, FP8=fp8, num_warps=4
        )
    return out_TF
