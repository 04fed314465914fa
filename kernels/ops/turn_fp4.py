"""Rotary embedding of index queries and their rounding to FP4, which is exact in bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import fake_quant
from kernels.op import Op

# N = rows, h = index heads, d = index head size, P = rotated pairs: the last 2 P dims


def reference(x_Nhd: Tensor, turns_NP: Tensor) -> Tensor:
    """[N, h, d] in the dtype of x: turned by the complex `turns`, then the values that the row
    format "fp4" keeps."""
    rows, heads, size = x_Nhd.shape
    pairs = turns_NP.shape[1]
    exact = x_Nhd.to(torch.promote_types(x_Nhd.dtype, torch.float32))
    plain, rotated = torch.split(exact, [size - 2 * pairs, 2 * pairs], -1)
    turned = torch.view_as_complex(rotated.reshape(rows, heads, pairs, 2)) * turns_NP.unsqueeze(1)
    whole = torch.cat([plain, torch.view_as_real(turned).flatten(-2)], -1)
    return fake_quant(whole, "fp4").to(x_Nhd.dtype)


turn_fp4 = Op("turn_fp4", reference, cuda="kernels.turn_kernels:turn_fp4")
