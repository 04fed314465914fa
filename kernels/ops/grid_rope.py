"""Rotary position embedding of patches on a grid: half of the pairs turn by row, half by column."""

from __future__ import annotations

import torch
from torch import Tensor


# N = patches, P = rotated pairs (half by row, half by column), H = heads, d = head size (2 P)
def grid_turns(rows: int, columns: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, 1, P] of each patch's angles, row after row; made in float64.

    `frequencies` [P / 2], float64, are radians per step; both axes have the same.
    """
    by_row = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns)
    by_column = torch.arange(columns, dtype=torch.float64).repeat(rows)
    angles_N1P = torch.cat(
        [by_row[:, None] * frequencies, by_column[:, None] * frequencies], 1
    ).unsqueeze(1)
    dtype = torch.get_default_dtype()
    return angles_N1P.cos().to(dtype), angles_N1P.sin().to(dtype)


def grid_rope(x_NHd: Tensor, cos_N1P: Tensor, sin_N1P: Tensor) -> Tensor:
    """x with pair i, which is dims i and P + i of each head, turned by angle i."""
    first_NHP, second_NHP = x_NHd.chunk(2, -1)
    return torch.cat(
        [
            first_NHP * cos_N1P - second_NHP * sin_N1P,
            second_NHP * cos_N1P + first_NHP * sin_N1P,
        ],
        -1,
    )
