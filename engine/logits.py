"""What a request does to its logits before one is chosen: penalties, bias, masks, in this order.

Pure. Penalties see the model's own logits, so a bias is neither multiplied nor divided; masks come
last, the grammar's as the very last, so nothing brings a forbidden token back. docs/sampling.md
says whose conventions these are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.context import Context
from engine.device_copies import to_device
from engine.grammar import Constraint

# V = vocabulary

_LARGEST = 1e300  # what a tiny repetition penalty can make of a logit; infinities have no order


def change(logits_V: Tensor, context: Context) -> Tensor:
    """New logits, float64 as the given ones; -inf where the token must not come.

    BadRequest if the request's grammar cannot say what may come.
    """
    if context.penalises:
        logits_V = _penalise(logits_V, context)
    if context.sampling.logit_bias:
        ids, bias = (tensor.to(logits_V.device) for tensor in context.bias)
        logits_V = logits_V.index_add(0, ids, bias)
    unmasked_V = logits_V
    if context.allowed is not None:
        allowed = context.allowed.to(logits_V.device)
        only_V = torch.full_like(logits_V, -math.inf)
        logits_V = only_V.index_copy(0, allowed, logits_V[allowed])
    if forbidden := context.forbidden():
        ids = to_device(forbidden, torch.int64, logits_V.device)
        logits_V = logits_V.index_fill(0, ids, -math.inf)
    if context.grammar is not None:
        logits_V = _follow(logits_V, unmasked_V, context, context.grammar)
    return logits_V


def _follow(masked_V: Tensor, unmasked_V: Tensor, context: Context, grammar: Constraint) -> Tensor:
    """Only what the grammar lets come. The end is its alone to allow: no mask keeps an answer
    from ending that cannot go on, and min_tokens only puts the end off."""
    allowed = grammar.allowed()
    ids_V = torch.zeros(len(masked_V), dtype=torch.bool)
    size = min(len(ids_V), len(allowed.ids_V))
    ids_V[:size] = allowed.ids_V[:size]
    ids_V[context.stop_ids] = False
    masked_V = masked_V.masked_fill(~ids_V.to(masked_V.device), -math.inf)
    if allowed.end and (context.may_stop or bool((masked_V == -math.inf).all())):
        stop_ids = context.stop_ids.to(masked_V.device)
        masked_V = masked_V.index_copy(0, stop_ids, unmasked_V[stop_ids])
    return masked_V


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
