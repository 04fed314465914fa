"""Rows of Engram tables, decoded; from pinned host memory too, which a GPU reads by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import decode_fp8_rows
from kernels.op import Op

# T = rows, X = table rows of each, dim = values of a table row, a multiple of 32


def reference(
    rows_TX: Tensor, codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """As engram_gather, wherever the table is: it is read there."""
    rows = rows_TX.to(codes.device)
    decoded = decode_fp8_rows(codes[rows], scales[rows]).flatten(1)
    return decoded.to(rows_TX.device, dtype)


_gather = Op("engram_gather", reference, cuda="kernels.row_kernels:engram_gather")


def engram_gather(
    codes: Tensor, scales: Tensor, rows_TX: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """[T, X * dim] where `rows` are: the table's rows side by side.

    uint8 codes [rows, dim] and scales [rows, dim / 32] as kernels/formats.py encodes FP8 rows.
    If `rows` are on a GPU, the table is there too or in pinned memory of the host.
    """
    return _gather(rows_TX, codes, scales, dtype)
