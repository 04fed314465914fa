"""The best-scored rows, in row order."""

from __future__ import annotations

import torch
from torch import Tensor


# ... = any leading dimensions, J = rows to choose from, K = rows chosen
def top_rows(scores_J: Tensor, count: int) -> Tensor:
    """Numbers [..., K = count] of the best rows above -inf, ascending, then -1.

    Equal scores: the lower row wins, which an unordered top-k does not promise. So the row
    number is made part of what is compared.
    """
    rows = scores_J.shape[-1]
    bits = (scores_J.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    keys = (order.to(torch.int64) << 32) - torch.arange(rows, device=scores_J.device)
    found = keys.topk(min(count, rows), dim=-1).indices
    chosen = torch.where(scores_J.gather(-1, found) > -torch.inf, found, rows)
    chosen = chosen.sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == rows, -1)
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=-1)
