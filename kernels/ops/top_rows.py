"""The best-scored rows, in row order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.op import Op


# ... = any leading dimensions, J = rows to choose from, K = rows chosen
def _top_rows(scores_J: Tensor, count: int) -> Tensor:
    """Numbers [..., K = count] of the best rows above -inf, ascending, then -1.

    Equal scores: the lower row wins, which an unordered top-k does not promise.
    """
    rows = scores_J.shape[-1]
    order = torch.sort(scores_J, dim=-1, descending=True, stable=True)
    found = torch.where(order.values > -torch.inf, order.indices, rows)[..., :count]
    found = found.sort(dim=-1).values
    found = found.masked_fill(found == rows, -1)
    return torch.nn.functional.pad(found, (0, count - found.shape[-1]), value=-1)


def _top_rows_numpy(scores_J: Tensor, count: int) -> Tensor:
    """Partitions what makes every entry different: the score and, below it, the row number."""
    scores = scores_J.numpy() + np.float32(0)  # makes -0.0 equal to 0.0
    rows = scores.shape[-1]
    kept = min(count, rows)
    bits = scores.view(np.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    keys = order.astype(np.int64)
    keys <<= 32
    keys -= np.arange(rows)
    if kept < rows:
        found = np.argpartition(keys, rows - kept, axis=-1)[..., rows - kept :]
    else:
        found = np.broadcast_to(np.arange(rows), scores.shape)
    chosen = np.where(np.take_along_axis(scores, found, -1) > -np.inf, found, rows)
    chosen.sort(axis=-1)
    result = np.full((*scores.shape[:-1], count), -1)
    result[..., :kept] = np.where(chosen == rows, -1, chosen)
    return torch.from_numpy(result)


top_rows = Op("top_rows", _top_rows, cpu=_top_rows_numpy)
