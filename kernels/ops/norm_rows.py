"""Root-mean-square norms as a bf16 forward needs them: computed in float32, rounded once.

What a linear layer with FP8 inputs reads can be rounded on the way, and the streams' weighted sum
taken before the norm, without going through memory. On a CPU the references run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats import fake_quant
from kernels.triton_quantise import fp8_rounded

# T = rows, D = width, a multiple of 32 where rounded; n = streams


class Normed(NamedTuple):
    """`rounded` is `plain` as the row format "fp8" rounds; the same tensor if not asked for."""

    plain_TD: Tensor
    rounded_TD: Tensor


def reference(x_TD: Tensor, weight_D: Tensor, eps: float, *, fp8: bool = False) -> Normed:
    """x / sqrt(mean(x**2) + eps) * weight in the dtype of x, from float32 if that is narrower."""
    exact = _wide(x_TD)
    norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    factor = (norm * norm / exact.shape[-1] + eps).rsqrt()
    plain = (exact * factor * weight_D).to(x_TD.dtype)
    return Normed(plain, fake_quant(plain, "fp8") if fp8 else plain)


def collapse_reference(
    streams_TnD: Tensor, pre_Tn: Tensor, weight_D: Tensor, eps: float, *, fp8: bool = False
) -> Normed:
    """The norm of the sum of the streams, each times its `pre`."""
    total_TD = torch.bmm(pre_Tn.unsqueeze(1), streams_TnD.to(pre_Tn.dtype)).squeeze(1)
    return reference(total_TD.to(streams_TnD.dtype), weight_D, eps, fp8=fp8)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ------------------------------------------------------------------ kernel


@triton.jit
def _norm(
    x,
    pre,
    weight,
    plain,
    rounded,
    row_stride,
    eps,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    FP8: tl.constexpr,
):
    """One row; STREAMS = 0: x is the row itself, else the row's streams, one after another."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    if STREAMS == 0:
        values = tl.load(x + t * row_stride + d, mask=inside, other=0.0).to(tl.float32)
    else:
        values = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(STREAMS):
            stream = tl.load(x + (t * STREAMS + i) * D + d, mask=inside, other=0.0)
            values += tl.load(pre + t * STREAMS + i) * stream.to(tl.float32)
        values = values.to(rounded.dtype.element_ty).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    values = (values * factor * scale).to(rounded.dtype.element_ty)
    if PLAIN:
        tl.store(plain + t * D + d, values, mask=inside)
    if FP8:
        groups = tl.reshape(values.to(tl.float32), (BLOCK // 32, 32))
        values = tl.reshape(fp8_rounded(groups), (BLOCK,)).to(rounded.dtype.element_ty)
    tl.store(rounded + t * D + d, values, mask=inside)


# ------------------------------------------------------------------ launch


def norm_rows(x_TD: Tensor, weight_D: Tensor, eps: float, *, fp8: bool = False) -> Tensor:
    """Its `rounded`. The rows of x may be parts of wider rows."""
    if not x_TD.is_cuda:
        return reference(x_TD, weight_D, eps, fp8=fp8).rounded_TD
    assert x_TD.stride(1) == 1
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, None, weight_D, eps, out_TD, out_TD, plain=False, fp8=fp8)
    return out_TD


def collapse_norm(
    streams_TnD: Tensor, pre_Tn: Tensor, weight_D: Tensor, eps: float, *, fp8: bool = False
) -> Normed:
    """As the reference, up to the order of sums; the streams are contiguous."""
    if not streams_TnD.is_cuda:
        return collapse_reference(streams_TnD, pre_Tn, weight_D, eps, fp8=fp8)
    assert streams_TnD.is_contiguous()
    shape = (streams_TnD.shape[0], streams_TnD.shape[2])
    rounded_TD = streams_TnD.new_empty(shape)
    plain_TD = streams_TnD.new_empty(shape) if fp8 else rounded_TD
    _launch(streams_TnD, pre_Tn, weight_D, eps, plain_TD, rounded_TD, plain=fp8, fp8=fp8)
    return Normed(plain_TD, rounded_TD)


def _launch(
    x: Tensor,
    pre_Tn: Tensor | None,
    weight_D: Tensor,
    eps: float,
    plain_TD: Tensor,
    rounded_TD: Tensor,
    *,
    plain: bool,
    fp8: bool,
) -> None:
    rows, width = rounded_TD.shape
    if not rows:
        return
    block = max(32, triton.next_power_of_2(width))
    _norm[(rows,)](
        x,
        weight_D if pre_Tn is None else pre_Tn.contiguous(),
        weight_D,
        plain_TD,
        rounded_TD,
        x.stride(0),
        eps,
        STREAMS=0 if pre_Tn is None else pre_Tn.shape[1],
        D=width,
        BLOCK=block,
        PLAIN=plain,
        FP8=fp8,
        num_warps=min(8, max(1, block // 256)),
    )
