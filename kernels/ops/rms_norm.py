"""Root-mean-square norm of each row."""

from __future__ import annotations

import torch
from torch import Tensor


# ... = rows, D = width
def rms_norm(x_D: Tensor, weight_D: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension; `eps` has no dimension."""
    norm = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True)
    mean = torch.addcmul(eps, norm, norm, value=1 / x_D.shape[-1])
    return (x_D * mean.rsqrt()).mul_(weight_D)
