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
    """Finds the score of the last row chosen; rows above it and the first ones equal to it."""
    scores = scores_J.numpy() + np.float32(0)  # makes -0.0 equal to 0.0
    rows = scores.shape[-1]
    kept = min(count, rows)
    least = np.partition(scores, rows - kept, axis=-1)[..., rows - kept, None]
    chosen = scores > least
    equal = scores == least
    if np.count_nonzero(chosen) + np.count_nonzero(equal) > least.size * kept:
        room = kept - chosen.sum(-1, keepdims=True, dtype=np.int32)
        equal &= equal.cumsum(-1, dtype=np.int32) <= room
    chosen |= equal
    places = np.flatnonzero(chosen)
    best = places % rows
    some_absent = least.min() == -np.inf
    if some_absent:
        best[scores.reshape(-1)[places] == -np.inf] = rows
    best = best.reshape(*scores.shape[:-1], kept)
    if some_absent:
        best.sort(-1)
        best[best == rows] = -1
    if kept < count:
        best = np.pad(best, [(0, 0)] * (best.ndim - 1) + [(0, count - kept)], constant_values=-1)
    return torch.from_numpy(best)


top_rows = Op("top_rows", _top_rows, cpu=_top_rows_numpy)
