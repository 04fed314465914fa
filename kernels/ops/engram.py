"""Engram's arithmetic: which table rows an n-gram reads, and how strongly a row takes them in."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.op import elementwise

# T = rows, N = longest n-gram, O = N - 1 orders, h = hash heads of an order, n = streams,
# D = hidden size


def ngram_rows(
    ids_TN: Tensor, multipliers_N: Tensor, primes_Oh: Tensor, offsets_Oh: Tensor
) -> Tensor:
    """Table rows [T, O * h] of compressed ids at t, t - 1, ...; all int64.

    Order 2 hashes two ids, order 3 three, and so on: xor of the products so far.
    """
    products_TN = ids_TN * multipliers_N
    mixed = products_TN[:, 0]
    rows = []
    for order in range(len(primes_Oh)):
        mixed = mixed ^ products_TN[:, order + 1]
        rows.append(mixed.unsqueeze(1) % primes_Oh[order] + offsets_Oh[order])
    return torch.cat(rows, 1)


def engram_gates(streams_TnD: Tensor, keys_TnD: Tensor, weight_nD: Tensor, eps: Tensor) -> Tensor:
    """[T, n]: sigmoid of the signed square root of how well each stream matches its key.

    `weight` is the product of the two norms' weights.
    """
    size = streams_TnD.shape[-1]
    products_Tn = (keys_TnD * weight_nD).mul_(streams_TnD).sum(-1)
    match_Tn = products_Tn * _inverse_rms(streams_TnD, eps) * _inverse_rms(keys_TnD, eps)
    match_Tn = match_Tn * size**-0.5
    root_Tn = match_Tn.sign() * match_Tn.abs().clamp(min=1e-6).sqrt()
    return elementwise(torch.sigmoid, root_Tn)


def _inverse_rms(x_TnD: Tensor, eps: Tensor) -> Tensor:
    norm_Tn = torch.linalg.vector_norm(x_TnD, dim=-1)
    return torch.addcmul(eps, norm_Tn, norm_Tn, value=1 / x_TnD.shape[-1]).rsqrt()
