"""The largest score of each block of rows that a query row sees, for choosing whole blocks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (kernels are written in Triton's language, which has no annotations)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# T = query rows, J = rows to choose from, B = blocks of them; the last one may be short


def reference(scores_TJ: Tensor, seen_T: Tensor, block: int) -> Tensor:
    """[T, B] of each row's first `seen` scores; the block of the last of them counts as infinite,
    blocks without any as minus infinite. What stands from row `seen` on may be anything.
    """
    rows, length = scores_TJ.shape
    hidden_TJ = torch.arange(length, device=scores_TJ.device) >= seen_T.unsqueeze(1)
    shown_TJ = scores_TJ.masked_fill(hidden_TJ, -torch.inf)
    whole_TJ = torch.nn.functional.pad(shown_TJ, (0, -length % block), value=-torch.inf)
    maxima_TB = whole_TJ.view(rows, -1, block).amax(2)
    blocks_B = torch.arange(maxima_TB.shape[1], device=scores_TJ.device)
    newest_TB = blocks_B == ((seen_T - 1) // block).unsqueeze(1)  # -1 if nothing is seen
    return maxima_TB.masked_fill(newest_TB, torch.inf)


@triton.jit
def _block_maxima(scores, seen_T, maxima, length, blocks, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """COUNT blocks of row t; SIZE is a power of two."""
    t = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    seen = tl.load(seen_T + t)
    j = b[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(scores + t * length + j, mask=j < seen, other=float("-inf"))
    newest = (seen > 0) & (b == (seen - 1) // SIZE)
    most = tl.where(newest, float("inf"), tl.max(values, 1))
    tl.store(maxima + t * blocks + b, most, mask=b < blocks)


def block_maxima(scores_TJ: Tensor, seen_T: Tensor, block: int) -> Tensor:
    """As the reference, which runs on a CPU. `block` is a power of two, scores are float32."""
    if not scores_TJ.is_cuda:
        return reference(scores_TJ, seen_T, block)
    assert block & (block - 1) == 0
    rows, length = scores_TJ.shape
    blocks = triton.cdiv(length, block)
    maxima_TB = scores_TJ.new_empty(rows, blocks)
    if maxima_TB.numel():
        _block_maxima[(triton.cdiv(blocks, 256), rows)](
            scores_TJ.contiguous(), seen_T, maxima_TB, length, blocks, SIZE=block, COUNT=256
        )
    return maxima_TB
