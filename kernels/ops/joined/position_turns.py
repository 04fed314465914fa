"""Rotations of rows' positions by several sets of frequencies, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.rope import rotations

# S = sets, T = positions, P = rotated pairs


def reference(positions_T: Tensor, frequencies_SP: Tensor, backs: tuple[int, ...]) -> Tensor:
    """Unit complex numbers [S, T, P]: set s turns by position - backs[s], at least 0. Angles are
    made in float64; the result has torch's default precision.
    """
    back_S1 = torch.tensor(backs, device=positions_T.device).unsqueeze(1)
    positions_ST = (positions_T - back_S1).clamp(min=0)
    return rotations(positions_ST, frequencies_SP.unsqueeze(1)).squeeze(1)


@triton.jit
def _turns(positions, frequencies, out, rows, BACKS: tl.constexpr, P: tl.constexpr):
    """Set s of row t; bit s of BACKS: one position back."""
    s, t = tl.program_id(0), tl.program_id(1)
    p = tl.arange(0, P)
    position = tl.maximum(tl.load(positions + t) - ((BACKS >> s) & 1), 0)
    angle = position.to(tl.float64) * tl.load(frequencies + s * P + p)
    at = out + ((s * rows + t) * P + p) * 2
    tl.store(at, tl.cos(angle).to(tl.float32))
    tl.store(at + 1, tl.sin(angle).to(tl.float32))


def position_turns(positions_T: Tensor, frequencies_SP: Tensor, backs: tuple[int, ...]) -> Tensor:
    """As the reference, complex64 on a GPU. Backs are 0 or 1, P is a power of two."""
    sets, pairs = frequencies_SP.shape
    if not positions_T.is_cuda or pairs & (pairs - 1):
        return reference(positions_T, frequencies_SP, backs)
    out = torch.empty(
        sets, len(positions_T), pairs, 2, dtype=torch.float32, device=positions_T.device
    )
    _launch(positions_T, frequencies_SP, backs, out)
    return torch.view_as_complex(out)


def _launch(
    positions_T: Tensor, frequencies_SP: Tensor, backs: tuple[int, ...], out: Tensor
) -> None:
    sets, pairs = frequencies_SP.shape
    if len(positions_T):
        _turns[(sets, len(positions_T))](
            positions_T.contiguous(),
            frequencies_SP.contiguous(),
            out,
            len(positions_T),
            BACKS=sum(back << number for number, back in enumerate(backs)),
            P=pairs,
            num_warps=1,
        )
