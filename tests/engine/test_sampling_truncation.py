"""Which tokens may be drawn, and how often they are: against a reference of its own, in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.messages import Sampling
from engine.truncation import truncate
from tests.engine.sampling import Floats, draw, fits, random_logits

V = 12

OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100},
    {"top_k": -1},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.8},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.15},
]


def reference(logits: Floats, options: dict[str, Any]) -> Floats:
    """Probabilities [V], token by token from the likeliest on."""
    scaled = [float(logit) / options.get("temperature", 1.0) for logit in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if options.get("top_k", 0) > 0:
        order = order[: options["top_k"]]
    weight = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    whole, before, kept = math.fsum(weight.values()), 0.0, []
    for token in order:
        if options.get("top_p", 1.0) < 1.0:
            if before >= options["top_p"] * whole:
                break
            assert abs(before / whole - options["top_p"]) > 1e-9, "a border that rounding decides"
        before += weight[token]
        kept.append(token)
    kept = [token for token in kept if weight[token] >= options.get("min_p", 0.0)]
    share: Floats = np.zeros(len(logits))
    for token in kept:
        share[token] = weight[token]
    share /= share.sum()
    return share


def kept(logits: Tensor, **options: Any) -> list[int]:
    """Ids that are left of logits [V]."""
    scaled = logits.double() / options.get("temperature", 1.0)
    (left,) = truncate((scaled - scaled.max())[None], [Sampling(**options)])
    return torch.nonzero(left > -math.inf)[:, 0].tolist()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [2, V, 1000])
def test_what_is_left_is_what_the_reference_leaves(size: int, options: dict[str, Any]) -> None:
    for seed in range(8):
        options = options | {"temperature": 0.5 + seed / 4}
        (logits,) = random_logits(size, seed)
        share = reference(logits.double().numpy(), options)
        assert kept(logits, **options) == np.flatnonzero(share).tolist()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.8])
def test_draws_follow_the_renormalised_rest(options: dict[str, Any], temperature: float) -> None:
    options = options | {"temperature": temperature}
    (logits,) = random_logits(V, 1)
    share = reference(logits.double().numpy(), options)
    counts = draw(logits, 3000, seed=99, **options)
    assert fits(counts, share)
    other = reference(logits.double().numpy(), {"temperature": temperature * 1.5})
    assert not fits(counts, other), "the check could not have failed"


def test_equals_at_the_border_keep_the_lower_ids() -> None:
    even = torch.zeros(10)
    assert kept(even, top_k=3) == [0, 1, 2]
    assert kept(even, top_p=0.3) == [0, 1, 2]  # the mass before id 3 is 0.3, not less
    assert kept(even, top_p=0.31) == [0, 1, 2, 3]
    assert kept(even, min_p=1.0) == list(range(10))
    steps = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0])
    assert kept(steps, top_k=3) == [0, 1, 3]
    assert kept(steps, top_k=3, top_p=0.5) == [1, 3]


def test_one_token_always_stays() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, -math.inf])
    assert kept(logits, top_p=5e-324) == [1]
    assert kept(logits, top_k=1, top_p=0.01, min_p=1.0) == [1]
    assert kept(torch.tensor([-math.inf, 0.0]), top_k=2, top_p=0.5) == [1]


def test_top_p_is_of_what_top_k_leaves_and_min_p_comes_last() -> None:
    quarters = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(quarters, top_p=0.55) == [0, 1]
    assert kept(quarters, top_k=2, top_p=0.55) == [0]  # 0.4 of 0.7 is 0.57 already
    assert kept(quarters, top_p=0.85, min_p=0.6) == [0, 1]  # of 0.4, which is the largest


def test_a_row_is_cut_as_if_it_were_alone() -> None:
    logits = random_logits(V, 3, rows=len(OPTIONS)).double()
    logits -= logits.max(dim=1, keepdim=True).values
    sampling = [Sampling(**options) for options in OPTIONS]
    together = truncate(logits, sampling)
    for row, one in enumerate(sampling):
        assert torch.equal(truncate(logits[row : row + 1], [one])[0], together[row])
