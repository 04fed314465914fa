"""Weights as the checkpoint's formats round them, with gradients that pass straight through.

Works on stacks of matrices, so that a kind of weight costs a handful of launches in all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import E4M3_MAX, fake_quant
from model.catalogue import Kind

_SMALLEST_AMAX = 1e-4  # floor of a block's largest magnitude, part of the format


def rounded(stack: Tensor, kind: Kind) -> Tensor:
    """`stack` [..., out, in] rounded to `kind`; float32 in and out."""
    match kind:
        case "f32":
            return stack
        case "bf16":
            exact = stack.detach()
            return stack + (exact.bfloat16().float() - exact)
        case "fp8":
            return stack + (_fp8_blocks(stack.detach()) - stack.detach())
        case "fp8_rows":
            return fake_quant(stack, "fp8")
        case "fp4":
            return fake_quant(stack, "fp4")


def _fp8_blocks(stack: Tensor) -> Tensor:
    """e4m3 with one power of two for each block of 32 x 32."""
    *lead, out, width = stack.shape
    blocks = stack.reshape(*lead, out // 32, 32, width // 32, 32)
    amax = blocks.abs().amax((-3, -1), keepdim=True).clamp(min=_SMALLEST_AMAX)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # ceil of the logarithm
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    codes = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).view(stack.shape)
