"""Rotary position embedding on the last dimensions of each head, pairs side by side."""

from __future__ import annotations

import torch
from torch import Tensor


# T = rows, H = heads, P = rotated pairs, d = head size (>= 2 P)
def rotations(positions_T: Tensor, frequencies_P: Tensor) -> Tensor:
    """Unit complex numbers [T, 1, P]: the turn of each pair. Angles are made in float64."""
    angles_TP = positions_T.to(torch.float64).unsqueeze(-1) * frequencies_P
    dtype = torch.get_default_dtype()
    return torch.complex(angles_TP.cos().to(dtype), angles_TP.sin().to(dtype)).unsqueeze(1)


def rope(x_THd: Tensor, turns_T1P: Tensor) -> Tensor:
    """Rotate the last 2 P dims of x in place, by turns; returns x.

    Pair i is dims 2i and 2i + 1 of these. Conjugate turns undo the rotation.
    """
    rows, heads, _ = x_THd.shape
    pairs = turns_T1P.shape[2]
    rotated = x_THd[:, :, -2 * pairs :].view(rows, heads, pairs, 2)
    torch.view_as_complex(rotated).mul_(turns_T1P)
    return x_THd
