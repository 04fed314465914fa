"""Products with matrices as the checkpoint stores them: e4m3 codes, one ue8m0 scale a 32x32 block.

Such a value is exact in bf16, so only the sum rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import decode_fp8_blocks
from kernels.op import Op

# T = rows, N = outputs, K = dims


def reference(x_TK: Tensor, codes_NK: Tensor, scales: Tensor) -> Tensor:
    """x @ weight.T [T, N] in the dtype of x, summed in float32 if that is narrower.

    `codes` and `scales`, uint8 [N, K] and [ceil(N / 32), ceil(K / 32)], are the weight as
    kernels/formats.py encodes FP8 blocks.
    """
    wide = torch.promote_types(x_TK.dtype, torch.float32)
    weight_NK = decode_fp8_blocks(codes_NK, scales).to(wide)
    return (x_TK.to(wide) @ weight_NK.T).to(x_TK.dtype)


block_matmul = Op("block_matmul", reference, cuda="kernels.block_kernels:block_matmul")
