"""What the sampling tests share: contexts from keywords, and how well counts fit a distribution."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.messages import Request, Sampling, pack_ids
from engine.choice import Choice
from engine.context import Context
from engine.sampler import sample

Floats = npt.NDArray[np.float64]


def context(
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    stop_ids: Collection[int] = (),
    **options: Any,
) -> Context:
    """Of a request whose answer so far is `output`."""
    options = {"max_tokens": 1000} | options
    request = Request(request_id="r", prompt=pack_ids(prompt), sampling=Sampling(**options))
    return Context(request, [*prompt, *output], frozenset(stop_ids))


def at(position: int, **options: Any) -> Context:
    """Of a request whose next token takes that position; its ids are of no account."""
    options = {"max_tokens": 2**30} | options
    request = Request(request_id="r", prompt=pack_ids([0]), sampling=Sampling(**options))
    return Context(request, range(position))


def tokens(logits_RV: Tensor, *contexts: Context) -> list[int]:
    """One for each row, none of which may fail."""
    choices = sample(logits_RV, contexts)
    assert all(isinstance(choice, Choice) for choice in choices), choices
    return [choice.token for choice in choices if isinstance(choice, Choice)]


def draw(logits_V: Tensor, draws: int, **options: Any) -> Floats:
    """How often each token comes at `draws` positions."""
    request = at(1, **options).request
    contexts = [Context(request, range(position)) for position in range(1, draws + 1)]
    found = tokens(logits_V.expand(draws, -1), *contexts)
    return np.bincount(found, minlength=len(logits_V)).astype(np.float64)


def fits(counts: Floats, share: Floats) -> bool:
    """By chi-square, with a chance of 1e-4 to be wrong; what cannot come must not have come."""
    expected = share * counts.sum()
    if counts[share == 0.0].any():
        return False
    rare = expected <= 5  # the usual condition for the approximation: such are taken together
    cells = [*zip(counts[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() > 5:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    degrees = len(cells) - 1
    if degrees == 0:
        return True
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    # Wilson and Hilferty: the chi-square value that is exceeded with probability 1e-4
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    return bool(statistic < limit)


def random_logits(size: int, seed: int, rows: int = 1, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=generator) * spread
