"""Prompts whose early rows end at the cut: the same tokens wherever and however often they run."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import BadRequest, StartupError
from tests.plain_loop import straight
from tests.tiny import TinyCluster, load_tiny, make_prompt, make_request, tiny_config

KEPT = 24
TRUNCATED = {"truncation": "compact", "keep_tokens": KEPT}
LENGTHS = (1, KEPT, KEPT + 1, 32 + KEPT, 100, 129)


@pytest.mark.parametrize("colocated", [False, True], ids=["disaggregated", "colocated"])
async def test_a_truncated_prompt_has_the_answer_of_a_plain_loop_that_truncates(
    colocated: bool,
) -> None:
    requests = [
        make_request(make_prompt(length), f"{length}", max_tokens=5, temperature=1.5, seed=0)
        for length in LENGTHS
    ]
    config = tiny_config(router={"colocated": colocated}, model=TRUNCATED)
    async with TinyCluster(model=load_tiny("compact"), config=config) as cluster:
        answers = await asyncio.gather(*(cluster.answer(request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert tuple(answer) == straight(request, KEPT), request.request_id
        assert await cluster.settled()
    assert [straight(one, KEPT) == straight(one) for one in requests[:2]] == [True, True]
    assert any(straight(one, KEPT) != straight(one) for one in requests[2:])


async def test_log_probabilities_of_a_truncated_prompt_are_refused() -> None:
    async with TinyCluster(
        model=load_tiny("compact"), config=tiny_config(model=TRUNCATED)
    ) as cluster:
        request = make_request(make_prompt(40), max_tokens=1, prompt_logprobs=0)
        with pytest.raises(BadRequest, match=r"need all its rows.*model\.truncation"):
            await cluster.answer(request)
        assert await cluster.settled()


async def test_fewer_rows_than_a_window_and_a_draft_are_refused_at_the_start() -> None:
    config = tiny_config(model={**TRUNCATED, "keep_tokens": 19})
    with pytest.raises((StartupError, ValueError), match=r"keep_tokens is 19.*need 2"):
        async with TinyCluster(model=load_tiny("compact"), config=config):
            pass
