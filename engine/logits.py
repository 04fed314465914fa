"""What a request does to its logits before one is chosen: penalties, bias, masks, in this order.

Pure. Penalties see the model's own logits, so a bias is neither multiplied nor divided; masks come
last, so nothing brings a forbidden token back. docs/sampling.md says whose conventions these are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.context import Context

# V = vocabulary

_LARGEST = 1e300  # what a tiny repetition penalty can make of a logit; infinities have no order


def change(logits_V: Tensor, context: Context) -> Tensor:
    """New logits, float64 as the given ones; -inf where the token must not come."""
    if context.penalises:
        logits_V = _penalise(logits_V, context)
    if context.sampling.logit_bias:
        ids, bias = (tensor.to(logits_V.device) for tensor in context.bias)
        logits_V = logits_V.index_add(0, ids, bias)
    if context.allowed is not None:
        allowed = context.allowed.to(logits_V.device)
        only_V = torch.full_like(logits_V, -math.inf)
        logits_V = only_V.index_copy(0, allowed, logits_V[allowed])
    if forbidden := context.forbidden():
        ids = torch.tensor(forbidden, device=logits_V.device)
        logits_V = logits_V.index_fill(0, ids, -math.inf)
    return logits_V


def _penalise(logits_V: Tensor, context: Context) -> Tensor:
    """Repetition over prompt and output; presence and frequency over the output alone."""
    sampling = context.sampling
    counts_V = context.output_counts(len(logits_V)).to(logits_V.device)
    if sampling.repetition_penalty != 1.0:
        seen_V = (counts_V > 0).index_fill(0, context.prompt_ids.to(logits_V.device), True)
        less_V = torch.where(
            logits_V > 0,
            logits_V / sampling.repetition_penalty,
            logits_V * sampling.repetition_penalty,
        )
        logits_V = torch.where(seen_V, less_V.clamp(max=_LARGEST), logits_V)
    return (
        logits_V
        - sampling.frequency_penalty * counts_V.double()
        - sampling.presence_penalty * (counts_V > 0).double()
    )
