"""From places among candidate blocks to the numbers of the rows that stand there."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# T = query rows, K = places of each, C = candidate blocks of each


def reference(places_TK: Tensor, blocks_TC: Tensor, block: int) -> Tensor:
    """int32 [T, K]: row place % block of block number blocks[t, place // block]; -1 where the place
    is negative. All are int32.
    """
    inside_TK = places_TK.clamp(min=0)
    blocks_TK = blocks_TC.gather(1, (inside_TK // block).long())
    rows_TK = blocks_TK * block + inside_TK % block
    return rows_TK.masked_fill(places_TK < 0, -1)


@triton.jit
def _candidate_rows(
    places, blocks, out, count, width, candidates, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + i, mask=i < count, other=-1)
    live = place >= 0
    at = i // width * candidates + place // SIZE
    row = tl.load(blocks + at, mask=live, other=0) * SIZE + place % SIZE
    tl.store(out + i, tl.where(live, row, -1), mask=i < count)


def candidate_rows(places_TK: Tensor, blocks_TC: Tensor, block: int) -> Tensor:
    """As the reference, which runs on a CPU."""
    if not places_TK.is_cuda:
        return reference(places_TK, blocks_TC, block)
    out_TK = torch.empty_like(places_TK, memory_format=torch.contiguous_format)
    count = out_TK.numel()
    if count:
        _candidate_rows[(triton.cdiv(count, 1024),)](
            places_TK.contiguous(),
            blocks_TC.contiguous(),
            out_TK,
            count,
            places_TK.shape[1],
            blocks_TC.shape[1],
            SIZE=block,
            BLOCK=1024,
        )
    return out_TK
