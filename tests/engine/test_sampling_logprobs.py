"""Logprobs are the model's own, to the last digits of float64, whatever the options are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.messages import TokenLogprobs
from engine.choice import Choice, as_message
from engine.context import Context
from engine.sampler import sample
from tests.engine.sampling import context, random_logits

V = 50


def of(logits: Tensor, one: Context) -> tuple[int, TokenLogprobs]:
    (choice,) = sample(logits[None], [one])
    assert isinstance(choice, Choice)
    assert choice.logprobs is not None
    return choice.token, choice.logprobs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.2},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {4: 9.0}},
        {"allowed_token_ids": (4, 5, 6), "temperature": 1.0},
    ],
    ids=str,
)
def test_they_are_those_of_the_unmodified_logits(options: dict[str, Any]) -> None:
    for seed in range(10):
        (logits,) = random_logits(V, seed)
        token, logprobs = of(logits, context(logprobs=5, seed=seed, **options))
        exact = logits.double().numpy()
        exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
        best = np.argsort(-exact, kind="stable")[:5]
        assert logprobs.logprob == pytest.approx(exact[token], rel=1e-14)
        assert [id for id, _ in logprobs.top] == best.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(exact[best], rel=1e-14)


def test_equals_are_listed_by_id_and_impossible_tokens_not_at_all() -> None:
    logits = torch.full((V,), -math.inf)
    logits[[30, 7, 11]] = 1.0
    logits[2] = 2.0
    _, few = of(logits, context(logprobs=2))
    assert [id for id, _ in few.top] == [2, 7]
    _, many = of(logits, context(logprobs=20))
    assert [id for id, _ in many.top] == [2, 7, 11, 30]
    assert math.fsum(math.exp(value) for _, value in many.top) == pytest.approx(1.0)


def test_none_zero_and_more_than_there_are() -> None:
    (logits,) = random_logits(3, 0)
    assert sample(logits[None], [context()]) == [Choice(int(logits.argmax()))]
    token, alone = of(logits, context(logprobs=0))
    assert alone.top == ()
    _, all_of_them = of(logits, context(logprobs=20))
    assert dict(all_of_them.top)[token] == alone.logprob
    assert len(all_of_them.top) == 3


def test_a_row_alone_and_in_any_batch_has_the_same_bits() -> None:
    logits = random_logits(V, 4, rows=7)
    contexts = [context(logprobs=4, temperature=row / 4, seed=row) for row in range(7)]
    together = sample(logits, contexts)
    assert together == [sample(logits[i : i + 1], [contexts[i]])[0] for i in range(7)]


def test_they_are_said_beside_the_ids_or_not_at_all() -> None:
    some = TokenLogprobs(logprob=-0.5, top=((3, -0.5),))
    asked = as_message(4, [Choice(3, some), Choice(1, some)], "stop")
    assert (asked.first, asked.token_ids, asked.finish) == (4, (3, 1), "stop")
    assert asked.logprobs == (some, some)
    assert as_message(4, [Choice(3)]).logprobs == ()
