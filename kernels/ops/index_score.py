"""How relevant each compressed row is to each query row."""

from __future__ import annotations

import torch
from torch import Tensor


# R = requests, Q = query rows of each, H = index heads, d = index head size, J = index keys of each
def index_score(
    q_RQHd: Tensor, weights_RQH: Tensor, keys_RJd: Tensor, hidden_RQJ: Tensor
) -> Tensor:
    """[R, Q, J]: sum over h of weight * relu(q . key), -inf where `hidden`.

    J must be a multiple of 16 for a score not to depend on how many keys there are.
    """
    requests, queries, heads, size = q_RQHd.shape
    products = torch.bmm(q_RQHd.view(requests, queries * heads, size), keys_RJd.transpose(1, 2))
    products_RQHJ = products.relu_().view(requests, queries, heads, -1)
    scores_RQJ = _sum_heads(products_RQHJ.mul_(weights_RQH.unsqueeze(-1)))
    return scores_RQJ.masked_fill(hidden_RQJ, -torch.inf)


def _sum_heads(terms_RQHJ: Tensor) -> Tensor:
    """Adds heads by halves, in place: a reduction would choose its order by the number of keys."""
    heads = terms_RQHJ.shape[2]
    while heads > 1:
        half = heads // 2
        terms_RQHJ[:, :, :half].add_(terms_RQHJ[:, :, heads - half : heads])
        heads -= half
    return terms_RQHJ[:, :, 0]
