"""Rows of bytes into memory and out of it, by the bytes where they begin."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.op import Op

# N = rows, b = bytes of a row


def _put_rows(memory: Tensor, at_N: Tensor, rows_Nb: Tensor) -> None:
    """Row n to bytes at[n] onwards of `memory`, uint8 [bytes]; nowhere if at[n] < 0."""
    live_N = at_N >= 0
    within = torch.arange(rows_Nb.shape[1], device=at_N.device)
    memory[at_N[live_N].unsqueeze(1) + within] = rows_Nb[live_N]


def _take_rows(memory: Tensor, at_N: Tensor, nbytes: int) -> Tensor:
    """uint8 [N, nbytes]: the bytes from at[n] on; zeros if at[n] < 0."""
    within = torch.arange(nbytes, device=at_N.device)
    rows_Nb = memory[at_N.clamp(min=0).unsqueeze(1) + within]
    return rows_Nb.masked_fill_((at_N < 0).unsqueeze(1), 0)


put_rows = Op("put_rows", _put_rows, cuda="kernels.row_kernels:put_rows")
take_rows = Op("take_rows", _take_rows, cuda="kernels.row_kernels:take_rows")
