"""Sampling options: what cannot be is refused one by one, by its field's name, before any rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.client import build_request
from cluster.codec import decode, encode
from cluster.errors import BadRequest
from cluster.limits import check_request, vocabulary_served
from cluster.messages import Member, Prefill, Sampling
from cluster.request import MAX_BAD_WORDS, Grammar
from tests.cluster.fakes import LOAD, endpoint, pool, read, running, until

EVERYTHING: dict[str, Any] = {
    "temperature": 0.5,
    "seed": 2**63 - 1,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "logit_bias": ((5, -100.0), (6, 1.5)),
    "bad_words": ((1, 2), (3,)),
    "allowed_token_ids": (1, 2, 3),
    "min_tokens": 3,
    "max_tokens": 9,
    "stop_token_ids": (4,),
    "ignore_stop": False,
    "logprobs": 20,
    "prompt_logprobs": 20,
    "grammar": Grammar(kind="regex", text="[a-z]+"),
}


def test_every_option_is_there_and_travels() -> None:
    assert set(EVERYTHING) == set(Sampling.model_fields)
    request = build_request([1], **EVERYTHING)
    assert decode(encode(Prefill(request=request, attempt=1))) == Prefill(
        request=request, attempt=1
    )


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "[0, 100]"),
        ("temperature", math.nan, "[0, 100]"),
        ("temperature", math.inf, "[0, 100]"),
        ("seed", -1, f"[0, {2**63 - 1}]"),
        ("seed", 2**63, f"[0, {2**63 - 1}]"),
        ("top_k", -2, "[-1, "),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.01, "(0, 1]"),
        ("top_p", math.nan, "(0, 1]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.1, "[0, 1]"),
        ("repetition_penalty", 0.0, "(0, 100]"),
        ("repetition_penalty", math.inf, "(0, 100]"),
        ("presence_penalty", 2.1, "[-2, 2]"),
        ("presence_penalty", math.nan, "[-2, 2]"),
        ("frequency_penalty", -2.1, "[-2, 2]"),
        ("logit_bias", ((1, 100.5),), "[-100, 100]"),
        ("logit_bias", {1: -math.inf}, "[-100, 100]"),
        ("logit_bias", ((1, 1.0), (1, 2.0)), "one bias for a token id"),
        ("bad_words", ((1,), ()), "at least one token id"),
        ("bad_words", ((1,),) * (MAX_BAD_WORDS + 1), f"at most {MAX_BAD_WORDS} sequences"),
        ("allowed_token_ids", (), "at least one token id"),
        ("min_tokens", -1, "[0, "),
        ("min_tokens", 17, "[0, max_tokens = 16]"),
        ("max_tokens", 0, "[1, "),
        ("logprobs", -1, "[0, 20]"),
        ("logprobs", 21, "[0, 20]"),
        ("prompt_logprobs", 21, "[0, 20]"),
        ("top_q", 1, "not permitted"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_is_allowed(
    field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        Sampling(**{field: value})
    (problem,) = raised.value.errors()
    assert problem["loc"][0] == field
    assert allowed in problem["msg"]
    with pytest.raises(BadRequest) as refused:
        build_request([1, 2], **{field: value})
    assert str(refused.value).startswith(field)
    assert allowed in str(refused.value)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    for field, value in {
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 1.0,
        "repetition_penalty": 100.0,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "min_tokens": 16,
        "logprobs": 0,
    }.items():
        assert getattr(Sampling(**{field: value}), field) == value
    assert Sampling(logit_bias={"5": 100}).logit_bias == ((5, 100.0),)


def test_allowed_ids_that_are_all_bad_words_are_refused() -> None:
    with pytest.raises(ValidationError, match="that bad_words does not forbid"):
        Sampling(allowed_token_ids=(1, 2), bad_words=((1,), (2,)))
    assert Sampling(allowed_token_ids=(1, 2), bad_words=((1,), (2, 2))).allowed_token_ids


OUTSIDE: list[dict[str, Any]] = [
    {"stop_token_ids": (1, 50)},
    {"logit_bias": {50: 1.0}},
    {"bad_words": ((1, 2), (50, 1))},
    {"allowed_token_ids": (49, 50)},
]


@pytest.mark.parametrize("options", OUTSIDE, ids=str)
def test_ids_outside_the_vocabulary_are_refused(options: dict[str, Any]) -> None:
    (field,) = options
    request = build_request([1], **options)
    check_request(request, None, vocab_size=None)
    check_request(request, None, vocab_size=51)
    with pytest.raises(BadRequest, match=f"{field}.* 50 is outside the vocabulary of 50"):
        check_request(request, None, vocab_size=50)


def test_negative_ids_are_refused_whatever_the_vocabulary_is() -> None:
    for options in ({"bad_words": ((-1,),)}, {"allowed_token_ids": (2, -1)}):
        with pytest.raises(BadRequest, match="-1 is negative"):
            check_request(build_request([1], **options), None)


def test_the_smallest_vocabulary_of_all_ranks_rules() -> None:
    def member(vocab_size: int) -> Member:
        return Member(endpoint=endpoint(), load=LOAD.model_copy(update={"vocab_size": vocab_size}))

    assert vocabulary_served([]) is None
    assert vocabulary_served([member(0)]) is None
    assert vocabulary_served([member(0), member(60), member(50)]) == 50


async def test_the_edge_refuses_ids_outside_the_vocabulary_before_any_rank_hears_of_it() -> None:
    cluster, ranks = pool()
    for rank in ranks:
        rank.load = rank.load.model_copy(update={"vocab_size": 50})
    async with running(cluster, *ranks) as caller:
        await until(caller.members)
        for request in (build_request([50]), build_request([1], logit_bias={50: 1.0})):
            with pytest.raises(BadRequest, match="50 is outside the vocabulary of 50"):
                await read(caller, request)
        assert not any(rank.heard for rank in ranks)
