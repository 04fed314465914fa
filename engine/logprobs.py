"""What the model itself thinks of a token: log-probabilities of its unmodified logits.

Neither temperature nor any other option of the request has a part in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.messages import PromptLogprobs, TokenLogprobs

# R = rows of one chunk, V = vocabulary


def logprobs(logits_V: Tensor, token: int, alternatives: int) -> TokenLogprobs:
    """Of the token and of the likeliest ones, equals by id; none that the model rules out."""
    logprobs_V = torch.log_softmax(logits_V.double(), dim=0)
    top = [(id, float(logprobs_V[id])) for id in _likeliest(logits_V, alternatives)]
    return TokenLogprobs(logprob=float(logprobs_V[token]), top=tuple(top))


def prompt_logprobs(
    logits_RV: Tensor, first: int, tokens: Sequence[int], alternatives: int
) -> PromptLogprobs:
    """Of `tokens` at positions `first` and following: logits_RV[0] are those of the row before.

    Row by row: a chunk's float64 copy of a large vocabulary would be gigabytes.
    """
    scored = (
        logprobs(logits_V, token, alternatives)
        for logits_V, token in zip(logits_RV, tokens, strict=True)
    )
    return PromptLogprobs(first=first, logprobs=tuple(scored))


def _likeliest(logits_V: Tensor, count: int) -> list[int]:
    """Their ids, best first."""
    count = min(count, len(logits_V))
    if count == 0:
        return []
    border = logits_V.topk(count).values[-1]
    ids = torch.nonzero((logits_V >= border) & (logits_V > -math.inf))[:, 0]  # ascending
    order = torch.sort(logits_V[ids], descending=True, stable=True).indices
    found: list[int] = ids[order[:count]].tolist()
    return found
