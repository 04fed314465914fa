"""The compressor's pooling of two neighbouring positions into one latent."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.op import Op, elementwise

# N = groups, d = head size


def _compress(first_kv_Nd: Tensor, first_gate_Nd: Tensor, kv_Nd: Tensor, gate_Nd: Tensor) -> Tensor:
    """Per channel, the softmax of the two gates weighs the two values. [N, d].

    A softmax over two is a sigmoid of the difference.
    """
    share_Nd = elementwise(torch.sigmoid, gate_Nd - first_gate_Nd)
    return (1 - share_Nd) * first_kv_Nd + share_Nd * kv_Nd


compress = Op("compress", _compress, cuda="kernels.compress_kernel:compress")
