"""Random inputs of the ops that work on packed rows and weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import encode_fp4_rows, pack
from kernels.ops.packed_attention import Located
from kernels.ops.packed_experts import Fp4Matrices


def located(
    rows: int,
    keys: int,
    size: int,
    row_format: str,
    device: str,
    *,
    live: float = 0.9,
    seed: int = 0,
) -> Located:
    """Each row's keys anywhere in a memory of four times as many; some of them are missing."""
    generator = torch.Generator().manual_seed(seed)
    stored = 4 * max(keys, 1)
    packed = pack(torch.randn(stored, size, generator=generator), row_format)
    at = torch.randint(stored, (rows, keys), generator=generator) * packed.shape[1]
    missing = torch.rand(rows, keys, generator=generator) >= live
    return Located(packed.flatten().to(device), at.masked_fill(missing, -1).to(device))


def fp4_matrices(experts: int, out: int, dims: int, device: str, seed: int = 0) -> Fp4Matrices:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(experts, out, dims, generator=generator) * dims**-0.5
    return Fp4Matrices(*(part.to(device) for part in encode_fp4_rows(values)))


def routed(
    rows: int, slots: int, experts: int, device: str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Different experts for each row, and their shares."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, experts, generator=generator).argsort(1)[:, :slots]
    shares = torch.rand(rows, slots, generator=generator)
    return chosen.contiguous().to(device), (shares / shares.sum(1, keepdim=True)).to(device)


def error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| over all elements, in float64; NaN never passes."""
    wanted = expected.double()
    scale = float(wanted.norm())
    return float((found.double() - wanted).norm()) / (scale or 1.0)
