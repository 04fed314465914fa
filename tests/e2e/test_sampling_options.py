"""A request with every option on: the same answer on two ranks, on one, and after a loss."""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.generation import Timeline
from tests.e2e.losing import PROMPT, Pausing, ask, lose_decode
from tests.tiny import TinyCluster, make_request, tiny_config

ALLOWED = tuple(range(3, 203))
STOPS = ALLOWED[1::2]  # half of what can come: an answer is over soon after min_tokens
MIN_TOKENS = 9

EVERYTHING: dict[str, Any] = {
    "temperature": 1.2,
    "seed": 4321,
    "top_k": 120,
    "top_p": 0.97,
    "min_p": 0.03,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {5: 2.0, 7: 2.0, 9: -3.0},
    "bad_words": ((11,), (5, 7), (7, 5)),
    "allowed_token_ids": ALLOWED,
    "min_tokens": MIN_TOKENS,
    "max_tokens": 40,
    "stop_token_ids": STOPS,
    "ignore_stop": False,
    "logprobs": 3,
}

LOSSES = (1, 5, 8, 10)  # output tokens that are out by then


async def test_every_option_at_once_gives_one_answer_on_two_ranks_on_one_and_after_a_loss() -> None:
    request = make_request(PROMPT, **EVERYTHING)
    async with TinyCluster() as cluster:
        expected = await ask(cluster, request)
    async with TinyCluster(config=tiny_config(router={"colocated": True})) as cluster:
        assert await ask(cluster, request) == expected
        assert cluster.prefill[0].health().steps == 0
    for tokens in LOSSES:
        model, timeline = Pausing(tokens), Timeline()
        async with TinyCluster(decode=2, model=model) as cluster:
            answer, _ = await asyncio.gather(
                ask(cluster, request, timeline), lose_decode(cluster, model, timeline)
            )
        assert answer == expected
        assert [event.name for event in timeline.events].count("lost") == 1

    token_ids, logprobs = expected
    assert len(logprobs) == len(token_ids) > max(LOSSES)
    assert token_ids[-1] in STOPS
    assert not set(STOPS).intersection(token_ids[:MIN_TOKENS])
    assert set(ALLOWED).issuperset(token_ids)
    assert all(len(one.top) == 3 for one in logprobs)
