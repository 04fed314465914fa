"""The promise: disaggregated, colocated and a plain loop over the model give the same tokens.

Over real NIXL and from blocks to blocks, with the real tiny model; chunks of 32, blocks of 16, a
window of 16.
"""

from __future__ import annotations

import asyncio

import pytest

from cluster.messages import Request
from tests.plain_loop import straight
from tests.tiny import TinyCluster, load_tiny, make_prompt, make_request, tiny_config

LENGTHS = (1, 2, 3, 31, 32, 33, 127, 128, 129, 130, 255, 256, 257)
SEEDED = (2, 33, 128)
ALONE = (1, 2, 33, 128, 129)
TOKENS = 5


def _requests() -> list[Request]:
    greedy = [
        make_request(make_prompt(length), f"greedy {length}", max_tokens=TOKENS)
        for length in LENGTHS
    ]
    seeded = [
        make_request(
            make_prompt(length), f"seeded {length}", max_tokens=TOKENS, temperature=1.5, seed=length
        )
        for length in SEEDED
    ]
    return greedy + seeded


async def _check(cluster: TinyCluster, *requests: Request) -> None:
    answers = await asyncio.gather(*(cluster.answer(request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        assert tuple(answer) == straight(request), request.request_id


@pytest.mark.parametrize(
    "way", ["packed", "colocated", pytest.param("direct", marks=pytest.mark.full)]
)
async def test_a_busy_cluster_gives_the_tokens_of_a_plain_loop(way: str) -> None:
    config = tiny_config(
        router={"colocated": way == "colocated"},
        transfer={"path": "direct" if way == "direct" else "packed", "transport": "nixl"},
        decode={"engine": ROOMY},
    )
    async with TinyCluster(model=load_tiny(), config=config) as cluster:
        await _check(cluster, *_requests())
        assert await cluster.settled()
        if way != "colocated":
            path = "host/cma" if way == "direct" else "nixl/UCX"
            moved = cluster.prefill[0].status()["moved"]
            assert isinstance(moved, dict)
            assert list(moved) == [path]


async def test_requests_alone_and_pushed_directly_give_the_tokens_of_a_plain_loop() -> None:
    config = tiny_config(transfer={"path": "direct"})
    async with TinyCluster(model=load_tiny(), config=config) as cluster:
        for request in _requests():
            if request.prompt_length in ALONE:
                await _check(cluster, request)
        assert await cluster.settled()


def test_the_references_differ_so_that_equality_means_something() -> None:
    answers = [straight(request) for request in _requests()]
    assert len(set(answers)) == len(answers)
    assert any(len(set(answer)) > 2 for answer in answers)


ROOMY = {"num_blocks": 256, "num_slots": 32, "chunk_tokens": 32, "max_length": 512}
