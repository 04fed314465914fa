"""The next token from logits: greedy, or seeded by a Gumbel maximum; with its logprobs if asked.

    change      penalties, bias, masks                           engine/logits.py
    / temperature
    truncate    top-k, top-p, min-p                              engine/truncation.py
    + noise     a function of seed, position and id; the largest wins, which is a draw from the
                renormalised rest                                engine/noise.py

A row's token depends on that row and its context alone: neither the batch nor the rank nor a
failover changes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.errors import BadRequest, ClusterError
from engine.choice import Choice
from engine.context import Context
from engine.logits import change
from engine.logprobs import logprobs
from engine.noise import Purpose, gumbel
from engine.truncation import truncate

# R = rows, V = vocabulary, S = rows that are not simply the largest logit's

# How many float64 logits are worked on together; no token depends on it.
_AT_ONCE_CPU = 1 << 15  # what a core keeps close: two thirds of the time of 2**18 at V = 2048
_AT_ONCE_GPU = 1 << 24  # few launches, and 128 MiB for each of some ten temporaries


def sample(
    logits_RV: Tensor, contexts: Sequence[Context], spelled_ids: int | None = None
) -> list[Choice | ClusterError]:
    """The next token of each row's request, or why it cannot have one.

    Ids from `spelled_ids` on are padding of the vocabulary: they never come, whatever is asked.
    ClusterError for a row with a NaN or without a finite maximum; BadRequest where the request's
    own masks leave nothing, or its grammar cannot go on.
    """
    if not contexts:
        return []
    known_RV = logits_RV[:, :spelled_ids]
    best_R = known_RV.max(dim=1).values.tolist()  # a NaN anywhere makes the maximum NaN
    tokens: list[int | BadRequest | None] = list(
        known_RV.argmax(dim=1).tolist()
    )  # of equals the first
    sound = [math.isfinite(best) for best in best_R]
    others = [row for row, one in enumerate(contexts) if sound[row] and not one.takes_the_best]
    limit = _AT_ONCE_CPU if logits_RV.device.type == "cpu" else _AT_ONCE_GPU
    at_once = max(1, limit // logits_RV.shape[1])
    for first in range(0, len(others), at_once):
        rows = others[first : first + at_once]
        some_SV = logits_RV[rows].double()
        some_SV[:, known_RV.shape[1] :] = -math.inf
        some = _choose(some_SV, [contexts[row] for row in rows])
        for row, token in zip(rows, some, strict=True):
            tokens[row] = token
    return [
        _outcome(logits_RV[row], tokens[row], one, sound[row]) for row, one in enumerate(contexts)
    ]


def _choose(logits_SV: Tensor, contexts: Sequence[Context]) -> list[int | BadRequest | None]:
    """None where no token is left, an error where nobody knows what may come."""
    refused: dict[int, BadRequest] = {}
    for row, context in enumerate(contexts):
        if context.changes_logits:
            try:
                logits_SV[row] = change(logits_SV[row], context)
            except BadRequest as error:
                refused[row] = error
    best_S = logits_SV.max(dim=1).values
    tokens_S = logits_SV.argmax(dim=1)
    drawn = [row for row, one in enumerate(contexts) if one.sampling.temperature > 0.0]
    if drawn:
        tokens_S[drawn] = _draw(
            logits_SV[drawn] - best_S[drawn, None], [contexts[row] for row in drawn]
        )
    left = (best_S > -math.inf).tolist()
    return [
        refused.get(row) or (token if some else None)
        for row, (token, some) in enumerate(zip(tokens_S.tolist(), left, strict=True))
    ]


def _draw(logits_SV: Tensor, contexts: Sequence[Context]) -> Tensor:
    """Tokens [S] of logits whose maximum is 0."""
    sampling = [context.sampling for context in contexts]
    size, device = logits_SV.shape[1], logits_SV.device
    temperatures = torch.tensor(
        [one.temperature for one in sampling], dtype=torch.float64, device=device
    )
    left_SV = truncate(logits_SV / temperatures[:, None], sampling)
    seeds = [one.seed for one in sampling]
    positions = [context.position for context in contexts]
    noise_SV = gumbel(seeds, positions, Purpose.SAMPLE, size, device)
    return torch.argmax(left_SV + noise_SV, dim=1)


def _outcome(
    logits_V: Tensor, token: int | BadRequest | None, context: Context, sound: bool
) -> Choice | ClusterError:
    name, position = context.request.request_id, context.position
    if not sound:
        return ClusterError(f"{name}: the logits at position {position - 1} are no numbers")
    if isinstance(token, BadRequest):
        return BadRequest(f"{name}: {token}")
    if token is None:
        masks = "allowed_token_ids, bad_words and min_tokens"
        if context.grammar is not None:
            masks = "the grammar, allowed_token_ids and bad_words"
        return BadRequest(f"{name}: {masks} leave no token for position {position}")
    asked = context.sampling.logprobs
    return Choice(token, None if asked is None else logprobs(logits_V, token, asked))
