"""The choice of experts on a GPU in one launch; kernels/ops/route.py says what it computes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels.ops.route import Routed

# T = rows, E = experts, A = experts of a row


@triton.jit
def _route(
    logits,
    bias,
    experts,
    shares,
    bias_stride,
    scale,
    E: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One row in one warp: the largest is taken COUNT times."""
    t = tl.program_id(0).to(tl.int64)
    e, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    logit = tl.load(logits + t * E + e, mask=e < E, other=0.0)
    # the functions that torch calls, or nearly equal scores would come in another order
    softplus = tl.where(logit > 20.0, logit, libdevice.log1p(libdevice.exp(logit)))
    score = tl.sqrt_rn(softplus)
    choice = score + tl.load(bias + t * bias_stride + e, mask=e < E, other=0.0)
    choice = tl.where(e < E, choice, -float("inf"))
    chosen = tl.zeros((SLOTS,), tl.int64)
    taken = tl.zeros((SLOTS,), tl.float32)
    for place in tl.static_range(COUNT):
        best = tl.argmax(choice, 0, tie_break_left=True)
        chosen = tl.where(slot == place, best.to(tl.int64), chosen)
        taken = tl.where(slot == place, tl.sum(tl.where(e == best, score, 0.0), 0), taken)
        choice = tl.where(e == best, -float("inf"), choice)
    total = tl.sum(taken, 0) + 1e-20
    share = tl.div_rn(taken, tl.zeros((SLOTS,), tl.float32) + total) * scale
    tl.store(experts + t * COUNT + slot, chosen, mask=slot < COUNT)
    tl.store(shares + t * COUNT + slot, share, mask=slot < COUNT)


def route_top(logits_TE: Tensor, bias_TE: Tensor, count: int, scale: float) -> Routed:
    """As the reference, up to the last bit of a share."""
    rows, width = logits_TE.shape
    experts_TA = torch.empty(rows, count, dtype=torch.int64, device=logits_TE.device)
    shares_TA = torch.empty(rows, count, device=logits_TE.device)
    if rows:
        each = bias_TE.dim() == 2 and len(bias_TE) > 1
        assert bias_TE.stride(-1) == 1
        _route[(rows,)](
            logits_TE.float().contiguous(),
            bias_TE.float(),
            experts_TA,
            shares_TA,
            bias_TE.stride(0) if each else 0,
            scale,
            E=width,
            COUNT=count,
            BLOCK=triton.next_power_of_2(width),
            SLOTS=triton.next_power_of_2(count),
            num_warps=1,
        )
    return Routed(experts_TA, shares_TA)
