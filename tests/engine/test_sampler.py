"""Greedy is argmax, seeded sampling is softmax, and nothing counts but row, seed and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cluster.errors import ClusterError
from engine.choice import Choice
from engine.noise import Purpose, gumbel
from engine.sampler import sample
from kernels.exact import exp, log
from tests.engine.sampling import at, random_logits, tokens

V = 12


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    logits = torch.zeros(2, V)
    logits[0, 7] = 1.0
    logits[1, [3, 9]] = 1.0
    assert tokens(logits, at(5), at(5)) == [7, 3]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, V), []) == []


def test_draws_over_seeds_follow_the_softmax() -> None:
    draws = 1500
    logits = random_logits(V, 2)
    contexts = [at(3, temperature=1.0, seed=seed) for seed in range(draws)]
    counts = np.bincount(tokens(logits.expand(draws, -1), *contexts), minlength=V)
    share = torch.softmax(logits[0].double(), dim=0).numpy()
    spread = np.sqrt(share * (1 - share) / draws)
    assert (np.abs(counts / draws - share) < 4.5 * spread).all()


def test_seed_position_and_purpose_each_change_the_noise_and_nothing_else_does() -> None:
    (base,) = gumbel([1], [2], Purpose.SAMPLE, 1000)
    assert torch.equal(base, gumbel([5, 1], [6, 2], Purpose.SAMPLE, 1000)[1])
    assert torch.equal(base[:10], gumbel([1], [2], Purpose.SAMPLE, 10)[0])
    for other in gumbel([2, 1], [2, 3], Purpose.SAMPLE, 1000):
        assert not torch.isclose(base, other).any()
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1]
        assert abs(float(correlation)) < 0.15


def test_noise_is_gumbel_and_the_same_on_every_machine() -> None:
    noise = gumbel([7], [0], Purpose.SAMPLE, 200_000)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    # written down once; exactly rounded operations must give these bits everywhere
    (written,) = gumbel([2**63 - 1], [10**6], Purpose.SAMPLE, 3).tolist()
    assert [value.hex() for value in written] == [
        "-0x1.54370f1178e77p+0",
        "0x1.2f9d613146864p+0",
        "0x1.6399defe16aa9p+0",
    ]


def test_log_and_exp_are_as_good_as_the_library_s_and_the_same_on_every_machine() -> None:
    values = -torch.logspace(-20, math.log10(700), 5001, dtype=torch.float64)
    assert np.allclose(exp(values).numpy(), np.exp(values.numpy()), rtol=5e-16, atol=0)
    assert np.allclose(log(-values).numpy(), np.log(-values.numpy()), rtol=5e-16, atol=2e-16)
    assert exp(torch.tensor([0.0], dtype=torch.float64)).item() == 1.0
    assert 0 < exp(torch.tensor([-math.inf], dtype=torch.float64)).item() < 1e-300
    written = exp(torch.tensor([-0.1, -1.0, -30.5], dtype=torch.float64)).tolist()
    assert [value.hex() for value in written] == [
        "0x1.cf46d99d52b3ap-1",
        "0x1.78b56362cef38p-2",
        "0x1.ff3864232b407p-45",
    ]


def test_extreme_temperatures_and_logits_choose_a_token() -> None:
    logits = torch.tensor([[0.0, 3e38, -3e38, -math.inf]])
    for temperature in (5e-324, 1e-30, 1e-3, 100.0):
        assert tokens(logits, at(1, temperature=temperature, seed=1)) == [1]
        extreme = at(1, temperature=temperature, repetition_penalty=5e-324, top_p=5e-324, min_p=1.0)
        assert tokens(logits, extreme) == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_no_token_and_harm_no_neighbour(bad: float) -> None:
    logits = torch.zeros(2, V)
    logits[0, 4] = bad
    for options in ({}, {"temperature": 1.0}, {"presence_penalty": 1.0}):
        error, choice = sample(logits, [at(3, **options), at(3)])
        assert type(error) is ClusterError
        assert "r: the logits at position 2 are no numbers" in str(error)
        assert choice == Choice(0)
