"""Greedy is argmax, seeded sampling is softmax, and nothing counts but row, seed and position."""

from __future__ import annotations

import math

import pytest
import torch

from cluster.messages import Sampling
from engine.sampler import Purpose, gumbel, sample

V = 12


def _logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def _token(logits: torch.Tensor, params: Sampling, position: int) -> int:
    (token,) = sample(logits, [params], [position])
    assert token is not None
    return token


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    logits = torch.zeros(2, V)
    logits[0, 7] = 1.0
    logits[1, [3, 9]] = 1.0
    assert sample(logits, [Sampling(), Sampling()], [5, 5]) == [7, 3]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_seeded_draws_follow_the_softmax(temperature: float) -> None:
    draws = 1500
    logits = _logits(1)
    params = Sampling(temperature=temperature, seed=99)
    counts = torch.zeros(V, dtype=torch.float64)
    for position in range(draws):
        counts[_token(logits, params, position)] += 1
    expected = torch.softmax(logits[0].double() / temperature, dim=0) * draws
    seen = expected > 5  # the usual condition for the chi-square approximation
    statistic = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    degrees = int(seen.sum()) - 1
    # Wilson and Hilferty: the chi-square value that is exceeded with probability 1e-4
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit


def test_draws_over_seeds_follow_the_softmax_too() -> None:
    draws = 1500
    logits = _logits(2)
    counts = torch.zeros(V, dtype=torch.float64)
    for seed in range(draws):
        counts[_token(logits, Sampling(temperature=1.0, seed=seed), 3)] += 1
    share = torch.softmax(logits[0].double(), dim=0)
    spread = (share * (1 - share) / draws).sqrt()
    assert ((counts / draws - share).abs() < 4.5 * spread).all()


def test_a_row_alone_and_in_any_batch_gives_the_same_token() -> None:
    logits = _logits(3, rows=9)
    params = [Sampling(temperature=0.1 * row, seed=row) for row in range(9)]
    together = sample(logits, params, list(range(9)))
    order = [4, 0, 8, 2, 6, 1, 7, 3, 5]
    shuffled = sample(logits[order], [params[i] for i in order], order)
    alone = [sample(logits[i : i + 1], [params[i]], [i])[0] for i in range(9)]
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_seed_position_and_purpose_each_change_the_noise_and_nothing_else_does() -> None:
    base = gumbel(1, 2, Purpose.SAMPLE, 1000)
    assert torch.equal(base, gumbel(1, 2, Purpose.SAMPLE, 1000))
    assert torch.equal(base[:10], gumbel(1, 2, Purpose.SAMPLE, 10))
    for other in (gumbel(2, 2, Purpose.SAMPLE, 1000), gumbel(1, 3, Purpose.SAMPLE, 1000)):
        assert not torch.isclose(base, other).any()
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1]
        assert abs(float(correlation)) < 0.15


def test_noise_is_gumbel_and_the_same_on_every_machine() -> None:
    noise = gumbel(7, 0, Purpose.SAMPLE, 200_000)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    # written down once; exactly rounded operations must give these bits everywhere
    assert [value.hex() for value in gumbel(2**63 - 1, 10**6, Purpose.SAMPLE, 3).tolist()] == [
        "-0x1.54370f1178e77p+0",
        "0x1.2f9d613146864p+0",
        "0x1.6399defe16aa9p+0",
    ]


def test_extreme_temperatures_and_logits_choose_a_token() -> None:
    logits = torch.tensor([[0.0, 3e38, -3e38, -math.inf]])
    for temperature in (5e-324, 1e-30, 1e-3, 100.0):
        assert sample(logits, [Sampling(temperature=temperature, seed=1)], [0]) == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_no_token_and_harm_no_neighbour(bad: float) -> None:
    logits = torch.zeros(1, V)
    logits[0, 4] = bad
    logits = torch.cat([logits, torch.zeros(1, V)])
    for params in (Sampling(), Sampling(temperature=1.0)):
        assert sample(logits, [params, Sampling()], [3, 3]) == [None, 0]
