"""Which experts each row goes to, and with which share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.op import Op, elementwise


class Routed(NamedTuple):
    experts: Tensor  # int64 [T, A]
    shares: Tensor  # [T, A]


# T = rows, E = experts, A = experts of a row
def route(logits_TE: Tensor, bias_TE: Tensor, count: int, scale: float) -> Routed:
    """Score = sqrt(softplus(logit)); the bias only chooses. Equal choices: the lower expert.

    Shares are scores over the sum of the chosen scores, times `scale`. `bias` may be one row.
    """
    scores_TE = elementwise(torch.nn.functional.softplus, logits_TE).sqrt()
    order_TE = torch.sort(scores_TE + bias_TE, dim=-1, descending=True, stable=True).indices
    experts_TA = order_TE[:, :count].contiguous()
    chosen_TA = scores_TE.gather(1, experts_TA)
    total_T1 = chosen_TA.sum(1, keepdim=True) + 1e-20
    return Routed(experts_TA, chosen_TA / total_T1 * scale)


route_top = Op("route_top", route, cuda="kernels.route_kernel:route_top")
