"""Rotary embedding of heads, there and back, and their rounding to FP8 where a product needs it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import fake_quant
from kernels.op import Op

# T = rows, H = heads, d = head size, P = rotated pairs: the last 2 P dims, side by side


def reference(
    x_THd: Tensor, turns_TP: Tensor, *, inverse: bool = False, fp8: bool = False
) -> Tensor:
    """[T, H, d], contiguous: each pair times its complex turn, or with `inverse` divided by it.

    With `fp8` rounded as the row format "fp8" rounds. Computed in float32 if the dtype of x is
    narrower, and rounded once. `x` is used up: the result may be made in its place.
    """
    rows, heads, size = x_THd.shape
    pairs = turns_TP.shape[1]
    exact = x_THd.to(torch.promote_types(x_THd.dtype, torch.float32))
    plain, rotated = torch.split(exact, [size - 2 * pairs, 2 * pairs], -1)
    turns_T1P = (turns_TP.conj() if inverse else turns_TP).unsqueeze(1)
    turned = torch.view_as_complex(rotated.reshape(rows, heads, pairs, 2)) * turns_T1P
    whole = torch.cat([plain, torch.view_as_real(turned).flatten(-2)], -1)
    return (fake_quant(whole, "fp8") if fp8 else whole).to(x_THd.dtype)


turn_heads = Op("turn_heads", reference, cuda="kernels.turn_kernels:turn_heads")
