"""Products that the model defines in float32, of tensors that hold fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor


# T = rows, K = dims, X = outputs
def float32_product(x_TK: Tensor, weight_KX: Tensor) -> Tensor:
    """[T, X] in float32, or in the dtype of x if that is wider: products of two bf16 numbers are
    exact in float32, so only sums round.
    """
    if x_TK.is_cuda and x_TK.dtype == torch.bfloat16:
        return torch.mm(x_TK, weight_KX, out_dtype=torch.float32)
    exact = torch.promote_types(x_TK.dtype, torch.float32)
    return x_TK.to(exact) @ weight_KX.to(exact)
