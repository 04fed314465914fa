"""A decode rank that promises memory more often than it has it, as callers see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.messages import (
    Cancel,
    DrainingNow,
    Failed,
    Generate,
    NoRoomNow,
    Reserve,
    Reserved,
    Started,
    Stop,
    Tokens,
)
from cluster.wire import Identity, Peers, Stream, new_incarnation
from decode_worker.worker import DecodeRank
from tests.decode_worker.test_reservations import expect, reserve
from tests.tiny import SECRET, TinyCluster, make_prompt, make_request, tiny_config, until

ENGINE = {"num_blocks": 8, "num_slots": 8, "chunk_tokens": 32, "max_length": 512}
BIG = make_request(make_prompt(20), "big", max_tokens=70)  # 6 blocks in all


@pytest.fixture
async def cluster() -> AsyncIterator[TinyCluster]:
    config = tiny_config(decode={"engine": ENGINE | {"output_reserved": 0.25}})
    async with TinyCluster(prefill=0, decode=1, config=config) as cluster:
        yield cluster
        assert await cluster.settled()


@pytest.fixture
def rank(cluster: TinyCluster) -> DecodeRank:
    return cluster.decode[0]


@pytest.fixture
async def caller(cluster: TinyCluster) -> AsyncIterator[Peers]:
    peers = Peers(Identity("caller", new_incarnation(), SECRET), cluster.config.wire)
    yield peers
    await peers.close()


async def ask_whole(caller: Peers, rank: DecodeRank) -> Stream:
    return await caller.open(rank.endpoint, Reserve(request=BIG, attempt=2, whole=True))


async def test_a_reservation_takes_a_part_and_that_of_a_preempted_request_all(
    rank: DecodeRank, caller: Peers
) -> None:
    part, _ = await reserve(caller, rank, BIG)
    assert rank.pool.ledger().blocks.leased == 3  # 20 + a quarter of 70 positions
    await part.close()
    await until(lambda: rank.pool.ledger().blocks.leased == 0)
    whole = await ask_whole(caller, rank)
    await expect(whole, Reserved)
    assert rank.pool.ledger().blocks.leased == 6
    await whole.close()


async def test_a_preempted_request_waits_in_turn_and_nobody_new_is_let_in_before_it(
    rank: DecodeRank, caller: Peers
) -> None:
    held = [(await reserve(caller, rank, BIG))[0] for _ in range(2)]
    whole = await ask_whole(caller, rank)
    await until(lambda: rank.load().waiting == 3)
    small = Reserve(request=make_request([5, 6], "small", max_tokens=2), attempt=1)
    refused = await caller.open(rank.endpoint, small)
    await expect(refused, NoRoomNow)  # though there is a block for it
    for stream in held:
        await stream.close()
    await expect(whole, Reserved)
    await whole.close()


@pytest.mark.parametrize(
    "farewell", [Cancel(), Stop(index=3), None], ids=["cancel", "stop", "leave"]
)
async def test_one_that_leaves_while_it_waits_makes_way_for_the_next(
    rank: DecodeRank, caller: Peers, farewell: Cancel | Stop | None
) -> None:
    held = [(await reserve(caller, rank, BIG))[0] for _ in range(2)]
    whole = await ask_whole(caller, rank)
    await until(lambda: rank.admission.waiting == 1)
    if farewell is None:
        await whole.close()
    else:
        await whole.send(farewell)
    await until(lambda: rank.admission.waiting == 0)
    small, _ = await reserve(caller, rank, make_request([5, 6], "small", max_tokens=2))
    for stream in (small, *held):
        await stream.close()


async def test_a_drain_does_not_keep_those_who_wait(rank: DecodeRank, caller: Peers) -> None:
    held = [(await reserve(caller, rank, BIG))[0] for _ in range(2)]
    whole = await ask_whole(caller, rank)
    await until(lambda: rank.admission.waiting == 1)
    draining = asyncio.create_task(rank.drain(timeout_s=10))
    await until(lambda: rank.draining)
    for stream in held:
        await stream.close()
    await expect(whole, DrainingNow)
    await draining


async def test_tokens_come_before_the_word_that_the_answer_was_preempted(
    rank: DecodeRank, caller: Peers
) -> None:
    """Two colocated answers grow until one of them has to go: the younger, after its last token."""
    streams = [await caller.open(rank.endpoint, Generate(request=BIG, attempt=1)) for _ in range(2)]
    told: list[list[int]] = [[], []]
    ends: list[str] = ["", ""]

    async def hear(number: int) -> None:
        async for message in streams[number]:
            match message:
                case Started():
                    pass
                case Tokens():
                    assert message.first == len(told[number])
                    told[number] += message.token_ids
                    ends[number] = message.finish or ""
                case Failed():
                    ends[number] = message.error

    async with asyncio.timeout(20):
        await asyncio.gather(hear(0), hear(1))
    assert ends == ["length", "Preempted"]
    assert len(told[0]) == 70
    assert 0 < len(told[1]) < 70
    assert told[1] == told[0][: len(told[1])]
    assert rank.status()["preempted"] == 1
