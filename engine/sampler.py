"""The next token from logits: greedy, or seeded by a Gumbel maximum; with its logprobs if asked.

    change      penalties, bias, masks                           engine/logits.py
    / temperature
    truncate    top-k, top-p, min-p                              engine/truncation.py
    + noise     a function of seed, position and id; the largest wins, which is a draw from the
                renormalised rest               engine/noise.py, kernels/ops/gumbel.py

A row's token depends on that row and its context alone: neither the batch nor the rank nor a
failover changes it. All is computed where the logits are, and what comes to the host is a number a
row; only rows whose logprobs are wanted come whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.errors import BadRequest, ClusterError
from cluster.messages import Sampling
from engine.choice import Choice
from engine.context import Context
from engine.device_copies import Arriving, to_device
from engine.logits import change
from engine.logprobs import logprobs
from engine.noise import Purpose, noise_keys
from engine.truncation import truncate
from kernels.ops.gumbel import gumbel_argmax

# R = rows, V = vocabulary, S = rows that are not simply the largest logit's

# How many float64 logits are worked on together; no token depends on it.
_AT_ONCE_CPU = 1 << 15  # what a core keeps close: two thirds of the time of 2**18 at V = 2048
_AT_ONCE_GPU = 1 << 24  # few launches, and 128 MiB for each of some ten temporaries

UNSOUND = -1  # instead of a token: a NaN, or no finite maximum
_NONE_LEFT = -2  # instead of a token: the request's own masks leave nothing
_HERE = ("cpu", "cuda")  # other devices have no float64, or not with these bits


class Draw(NamedTuple):
    """What a drawn token depends on besides its logits."""

    sampling: Sampling
    position: int  # that the token will take


def sample(
    logits_RV: Tensor, contexts: Sequence[Context], spelled_ids: int | None = None
) -> list[Choice | ClusterError]:
    """The next token of each row's request, or why it cannot have one.

    Ids from `spelled_ids` on are padding of the vocabulary: they never come, whatever is asked.
    ClusterError for a row with a NaN or without a finite maximum; BadRequest where the request's
    own masks leave nothing, or its grammar cannot go on.
    """
    return Sampled(logits_RV, contexts, spelled_ids).choices()


def best_tokens(logits_RV: Tensor, spelled_ids: int | None = None) -> Tensor:
    """int64 [R]: the largest logit's id, of equals the first; UNSOUND for a row with none."""
    known_RV = logits_RV[:, :spelled_ids]
    best_R = known_RV.argmax(dim=1)  # a NaN counts as the largest
    largest_R = known_RV.gather(1, best_R.unsqueeze(1)).squeeze(1)
    return best_R.masked_fill(~largest_R.isfinite(), UNSOUND)


def draw(
    logits_RV: Tensor, rows: Sequence[int], draws: Sequence[Draw], spelled_ids: int | None = None
) -> Tensor:
    """int64 [len(rows)]: tokens drawn from the logits of `rows` as they are, for sound rows."""
    size = logits_RV.shape[1]
    found = []
    for part in _parts(len(rows), size, logits_RV.device):
        some_SV = _rows_of(logits_RV, rows[part], spelled_ids)
        found.append(_draw(some_SV - some_SV.max(dim=1).values[:, None], draws[part]))
    return torch.cat(found)


def unsound(name: str, position: int) -> ClusterError:
    """Why the request of that name gets no token after that position."""
    return ClusterError(f"{name}: the logits at position {position} are no numbers")


class Sampled:
    """Tokens that are being chosen; `choices` waits for them, and for nothing queued later."""

    def __init__(
        self, logits_RV: Tensor, contexts: Sequence[Context], spelled_ids: int | None = None
    ) -> None:
        """As sample(). The logits may change as soon as this has returned."""
        self._contexts = contexts
        self._refused: dict[int, BadRequest] = {}
        if not contexts:
            return
        if logits_RV.device.type not in _HERE:
            logits_RV = logits_RV.cpu()
        tokens_R = best_tokens(logits_RV, spelled_ids)
        others = [row for row, one in enumerate(contexts) if not one.takes_the_best]
        for part in _parts(len(others), logits_RV.shape[1], logits_RV.device):
            rows = others[part]
            some_S = self._choose(_rows_of(logits_RV, rows, spelled_ids), rows)
            at_S = to_device(rows, torch.int64, logits_RV.device)
            some_S = some_S.masked_fill(tokens_R[at_S] == UNSOUND, UNSOUND)
            tokens_R = tokens_R.index_copy(0, at_S, some_S)
        self._tokens = Arriving(tokens_R)
        asked = [row for row, one in enumerate(contexts) if one.sampling.logprobs is not None]
        self._asked = {
            row: Arriving(logits_RV[row]) for row in asked
        }  # whole rows: float64 sums of a vocabulary are made by the host

    def choices(self) -> list[Choice | ClusterError]:
        """One for each row."""
        if not self._contexts:
            return []
        tokens = self._tokens.wait().tolist()
        return [self._outcome(row, token) for row, token in enumerate(tokens)]

    def _choose(self, logits_SV: Tensor, rows: Sequence[int]) -> Tensor:
        """Tokens [S]; where nobody knows what may come, it is noted and the token is any."""
        contexts = [self._contexts[row] for row in rows]
        for number, (row, context) in enumerate(zip(rows, contexts, strict=True)):
            if context.changes_logits:
                try:
                    logits_SV[number] = change(logits_SV[number], context)
                except BadRequest as error:
                    self._refused[row] = error
        best_S = logits_SV.max(dim=1).values
        tokens_S = logits_SV.argmax(dim=1)
        drawn = [row for row, one in enumerate(contexts) if one.sampling.temperature > 0.0]
        if drawn:
            at_S = to_device(drawn, torch.int64, logits_SV.device)
            scaled_SV = logits_SV.index_select(0, at_S) - best_S.index_select(0, at_S)[:, None]
            draws = [Draw(contexts[row].sampling, contexts[row].position) for row in drawn]
            tokens_S = tokens_S.index_copy(0, at_S, _draw(scaled_SV, draws))
        return tokens_S.masked_fill(best_S == -math.inf, _NONE_LEFT)

    def _outcome(self, row: int, token: int) -> Choice | ClusterError:
        context = self._contexts[row]
        name, position = context.request.request_id, context.position
        if token == UNSOUND:
            return unsound(name, position - 1)
        if (refused := self._refused.get(row)) is not None:
            return BadRequest(f"{name}: {refused}")
        if token == _NONE_LEFT:
            masks = "allowed_token_ids, bad_words and min_tokens"
            if context.grammar is not None:
                masks = "the grammar, allowed_token_ids and bad_words"
            return BadRequest(f"{name}: {masks} leave no token for position {position}")
        asked = context.sampling.logprobs
        if asked is None:
            return Choice(token)
        return Choice(token, logprobs(self._asked[row].wait(), token, asked))


def _draw(logits_SV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens [S] of logits whose maximum is 0."""
    device = logits_SV.device
    sampling = [one.sampling for one in draws]
    temperatures_S = to_device([one.temperature for one in sampling], torch.float64, device)
    left_SV = truncate(logits_SV / temperatures_S[:, None], sampling)
    seeds, positions = [one.seed for one in sampling], [one.position for one in draws]
    return gumbel_argmax(left_SV, noise_keys(seeds, positions, Purpose.SAMPLE, device))


def _rows_of(logits_RV: Tensor, rows: Sequence[int], spelled_ids: int | None) -> Tensor:
    """float64 [S, V], new; -inf where an id only pads the vocabulary."""
    some_SV = logits_RV.index_select(0, to_device(rows, torch.int64, logits_RV.device)).double()
    if spelled_ids is not None:
        some_SV[:, spelled_ids:] = -math.inf
    return some_SV


def _parts(rows: int, size: int, device: torch.device) -> list[slice]:
    limit = _AT_ONCE_CPU if device.type == "cpu" else _AT_ONCE_GPU
    at_once = max(1, limit // size)
    return [slice(first, first + at_once) for first in range(0, rows, at_once)]
