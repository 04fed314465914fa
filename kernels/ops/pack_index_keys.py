"""Rotary embedding of new index keys, their rounding to FP4, and writing them where they belong."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import pack
from kernels.op import Op

# N = rows, d = index head size, P = rotated pairs: the last 2 P dims, side by side


def reference(x_Nd: Tensor, turns_NP: Tensor, memory: Tensor, at_N: Tensor) -> None:
    """Row n turned by the complex `turns`, in the format "fp4", to bytes at[n] onwards of `memory`,
    uint8 [bytes]; nowhere if at[n] < 0.
    """
    live_N = at_N >= 0
    exact = x_Nd[live_N].to(torch.promote_types(x_Nd.dtype, torch.float32))
    pairs = turns_NP.shape[1]
    plain, rotated = torch.split(exact, [exact.shape[1] - 2 * pairs, 2 * pairs], -1)
    turned = torch.view_as_complex(rotated.reshape(-1, pairs, 2)) * turns_NP[live_N]
    packed = pack(torch.cat([plain, torch.view_as_real(turned).flatten(1)], 1), "fp4")
    within = torch.arange(packed.shape[1], device=at_N.device)
    memory[at_N[live_N].unsqueeze(1) + within] = packed


pack_index_keys = Op("pack_index_keys", reference, cuda="kernels.turn_kernels:pack_index_keys")
