"""Penalties, bias and masks, by cases that are computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cluster.errors import BadRequest
from cluster.messages import Request
from engine.choice import Choice
from engine.context import Context
from engine.logits import change
from engine.request import Limits, check
from engine.sampler import sample
from tests.engine.sampling import context, draw, fits, tokens

LOGITS = torch.tensor([2.0, -1.0, 0.0, 4.0, 0.5])
OUT = -math.inf


def changed(of: Context) -> list[float]:
    result: list[float] = change(LOGITS.double(), of).tolist()
    return result


def greedy(of: Context) -> int:
    (token,) = tokens(LOGITS[None], of)
    return token


def test_repetition_divides_or_multiplies_what_prompt_or_output_has_once() -> None:
    seen = context(prompt=(0, 1, 0), output=(3, 3), repetition_penalty=2.0)
    assert changed(seen) == [1.0, -2.0, 0.0, 2.0, 0.5]
    assert changed(context(prompt=(1,), repetition_penalty=0.5)) == [2.0, -0.5, 0.0, 4.0, 0.5]


def test_presence_and_frequency_count_the_output_alone() -> None:
    said = {"prompt": (0, 0, 1), "output": (3, 4, 3, 3)}
    assert changed(context(**said, presence_penalty=0.5)) == [2.0, -1.0, 0.0, 3.5, 0.0]
    assert changed(context(**said, frequency_penalty=0.5)) == [2.0, -1.0, 0.0, 2.5, 0.0]
    both = context(**said, presence_penalty=-1.0, frequency_penalty=2.0)
    assert changed(both) == [2.0, -1.0, 0.0, -1.0, -0.5]


def test_repetition_comes_before_the_other_penalties_and_bias_after_them() -> None:
    all_of_them = context(
        output=(3,),
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={3: 10.0, 1: -100.0},
    )
    assert changed(all_of_them) == [1.0, -101.0, 0.0, 10.5, 0.5]  # 4 / 2 - 1 - 0.5 + 10


def test_a_greedy_answer_is_penalised_too() -> None:
    assert greedy(context()) == 3
    assert greedy(context(output=(3,), frequency_penalty=1.5)) == 3
    assert greedy(context(output=(3, 3), frequency_penalty=1.5)) == 0
    assert greedy(context(logit_bias=((4, 3.5),))) == 3  # of equals the first
    assert greedy(context(logit_bias=((4, 3.6),))) == 4


def test_only_allowed_tokens_come() -> None:
    assert changed(context(allowed_token_ids=(2, 1))) == [OUT, -1.0, 0.0, OUT, OUT]
    (picked,) = tokens(LOGITS[None], context(allowed_token_ids=(1,), temperature=2.0))
    assert picked == 1


def test_a_bad_word_is_forbidden_when_the_output_ends_with_its_beginning() -> None:
    words = ((0,), (4, 3, 2), (3, 1))

    def ruled_out(*output: int, prompt: tuple[int, ...] = (4, 3)) -> list[int]:
        logits = changed(context(prompt, output, bad_words=words))
        return [token for token, logit in enumerate(logits) if logit == OUT]

    assert ruled_out() == [0]  # the prompt does not begin a bad word
    assert ruled_out(4) == [0]
    assert ruled_out(4, 3) == [0, 1, 2]
    assert ruled_out(4, 3, 4) == [0]
    assert ruled_out(3) == [0, 1]


def test_stop_ids_come_only_after_min_tokens_of_all_attempts() -> None:
    def ruled_out(of: Context) -> list[int]:
        return [token for token, logit in enumerate(changed(of)) if logit == OUT]

    assert ruled_out(context(output=(0, 0), stop_ids=(3, 4), min_tokens=3)) == [3, 4]
    assert ruled_out(context(output=(0, 0, 0), stop_ids=(3, 4), min_tokens=3)) == []
    request: Request = context(min_tokens=3).request
    resumed = request.resume_after([1, 2, 1])
    assert ruled_out(Context(resumed, resumed.token_ids, frozenset({3}))) == []
    resumed = request.resume_after([1, 2])
    assert ruled_out(Context(resumed, resumed.token_ids, frozenset({3}))) == [3]


def test_nothing_brings_a_forbidden_token_back() -> None:
    insisting = context(
        output=(3,),
        bad_words=((3,),),
        logit_bias={3: 100.0},
        frequency_penalty=-2.0,
        allowed_token_ids=(3, 2),
    )
    assert changed(insisting) == [OUT, OUT, 0.0, OUT, OUT]


def test_a_request_that_forbids_everything_is_told_so_and_harms_no_neighbour() -> None:
    for temperature in (0.0, 1.0):
        nothing = context(
            allowed_token_ids=(3,), min_tokens=2, stop_ids=(3,), temperature=temperature, top_p=0.5
        )
        error, choice = sample(LOGITS.expand(2, -1), [nothing, context(temperature=0.001)])
        assert type(error) is BadRequest
        assert "leave no token for position 1" in str(error)
        assert choice == Choice(3)


def test_options_change_the_logits_before_the_draw() -> None:
    shares = torch.softmax((LOGITS + torch.tensor([0.0, 2.0, 0.0, -100.0, 0.0])) / 1.5, 0)
    counts = draw(LOGITS, 3000, seed=5, temperature=1.5, logit_bias={1: 2.0, 3: -100.0})
    assert fits(counts, shares.double().numpy())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("stop_token_ids", (5,)),
        ("logit_bias", {5: 1.0}),
        ("bad_words", ((0, 5),)),
        ("allowed_token_ids", (4, 5)),
    ],
)
def test_a_rank_refuses_ids_outside_its_vocabulary(option: str, value: Any) -> None:
    request = context(**{option: value}).request
    check(request, Limits(vocab_size=6, max_length=2000, capacity=2000), held=1)
    with pytest.raises(BadRequest, match=f"r: {option}: token id 5 is outside .* of 5"):
        check(request, Limits(vocab_size=5, max_length=2000, capacity=2000), held=1)


@pytest.mark.parametrize("seen", range(5))
def test_the_given_logits_stay_as_they_are(seen: int) -> None:
    before = LOGITS.clone()
    greedy(context(output=(seen,), presence_penalty=1.0, logit_bias={0: 1.0}, bad_words=((2,),)))
    assert torch.equal(LOGITS, before)
