"""Which tokens may be drawn at all: top-k, then top-p of what is left, then min-p.

A row's result depends on that row alone and is the same on every machine: tokens are ordered by
logit, equals by id, and probabilities are summed as integers, in which no order of summation
changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.messages import Sampling
from engine.device_copies import to_device
from kernels.exact import exp

# S = rows, V = vocabulary


def truncate(scaled_SV: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """`scaled_SV`, with -inf where the token is cut off.

    They are logits over temperature, float64, each row's maximum 0. At least one token stays.
    """
    cut = [row for row, one in enumerate(sampling) if one.top_k > 0 or one.top_p < 1.0]
    if len(cut) == len(sampling):
        scaled_SV = _keep_top(scaled_SV, sampling)
    elif cut:
        at_S = to_device(cut, torch.int64, scaled_SV.device)
        top = _keep_top(scaled_SV.index_select(0, at_S), [sampling[row] for row in cut])
        scaled_SV = scaled_SV.index_copy(0, at_S, top)
    if any(one.min_p > 0.0 for one in sampling):
        # the largest has exp(0) = 1, so this is the ratio of probabilities
        floor_S = _column([one.min_p for one in sampling], scaled_SV)
        scaled_SV = scaled_SV.masked_fill(exp(scaled_SV) < floor_S, -math.inf)
    return scaled_SV


def _keep_top(scaled_SV: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Top-k keeps k tokens exactly; top-p those with less than p before them."""
    size = scaled_SV.shape[1]
    ordered_SV, ids_SV = torch.sort(scaled_SV, dim=1, descending=True, stable=True)
    ranks_V = torch.arange(size, device=scaled_SV.device)
    k_S = _column([one.top_k if one.top_k > 0 else size for one in sampling], scaled_SV)
    p_S = _column([one.top_p if one.top_p < 1.0 else math.inf for one in sampling], scaled_SV)
    in_k_SV = ranks_V < k_S
    mass_SV = _mass(ordered_SV) * in_k_SV
    before_SV = mass_SV.cumsum(1) - mass_SV
    within_p_SV = before_SV.double() < p_S * mass_SV.sum(1, keepdim=True).double()
    cut_SV = ~(in_k_SV & within_p_SV)
    return scaled_SV.scatter(1, ids_SV, ordered_SV.masked_fill(cut_SV, -math.inf))


def _mass(scaled_SV: Tensor) -> Tensor:
    """Probabilities up to a factor, int64; a whole row's sum is below 2**62."""
    one = 2.0 ** (62 - scaled_SV.shape[1].bit_length())
    return torch.round(exp(scaled_SV) * one).long()


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return to_device(values, torch.float64, like.device)[:, None]
