"""Field cases FC-01, 02, 04, 06 and 07: blocks come back, and nobody reads those of others."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.errors import BadRequest, PromptTooLong
from cluster.generation import Timeline
from cluster.messages import Request
from tests.faults.field_cases import (
    GONE_S,
    answers,
    config_of,
    count,
    oracle,
    rounds,
    settles,
)
from tests.faults.gates import GatedCluster
from tests.tiny import TinyCluster, make_prompt, make_request, until

PROBE = make_request(make_prompt(20), "probe", max_tokens=4)

# ------------------------------------------------------------------ FC-01: the client goes away


async def _in_mid_prefill(cluster: TinyCluster, request: Request) -> None:
    steps = cluster.prefill[0].health().steps
    reading = asyncio.create_task(cluster.answer(request))
    await until(lambda: cluster.prefill[0].health().steps > steps)
    reading.cancel()
    await asyncio.wait([reading])


async def _after_five_tokens(cluster: TinyCluster, request: Request) -> None:
    deltas = cluster.caller.generate(request)
    seen = 0
    while seen < 5:
        seen += len((await anext(deltas)).token_ids)
    await deltas.aclose()


async def _by_dropping_the_handle(cluster: TinyCluster, request: Request) -> None:
    deltas = cluster.caller.generate(request)
    for _ in range(3):
        await anext(deltas)
    del deltas
    gc.collect()
    await asyncio.sleep(0)


async def _by_cancelling_its_task(cluster: TinyCluster, request: Request) -> None:
    seen = asyncio.Event()

    async def read() -> None:
        async for _ in cluster.caller.generate(request):
            seen.set()

    reading = asyncio.create_task(read())
    await seen.wait()
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading


Leave = Callable[[TinyCluster, Request], Awaitable[None]]


@rounds(2, 20)
@pytest.mark.parametrize(
    "leave",
    [_in_mid_prefill, _after_five_tokens, _by_dropping_the_handle, _by_cancelling_its_task],
)
async def test_fc01_a_client_that_goes_away_leaves_nothing_behind(
    leave: Leave, rounds: int
) -> None:
    config = config_of(
        prefill={"num_blocks": 256, "max_length": 4096},
        decode={"num_blocks": 256, "max_length": 4096},
    )
    async with TinyCluster(config=config) as cluster:
        expected = await cluster.answer(PROBE)
        for number in range(rounds):
            request = make_request(make_prompt(1500, number), f"gone {number}", max_tokens=1000)
            await leave(cluster, request)
            await settles(cluster, GONE_S)
            made = [rank.status()["tokens"] for rank in cluster.ranks]
            await asyncio.sleep(0.05)  # and no more of it is made
            assert [rank.status()["tokens"] for rank in cluster.ranks] == made
        await answers(cluster, PROBE, expected)


# ------------------------------------------------------------------ FC-02: decode refuses late


@rounds(3, 30)
async def test_fc02_decode_refuses_what_prefill_has_finished(rounds: int) -> None:
    """Its 4xx is the client's, and prefill's blocks come back at once."""
    config = config_of(prefill={"num_blocks": 64})
    async with GatedCluster(config=config) as cluster:
        expected = await cluster.answer(PROBE)
        (decode,), (prefill,) = cluster.decode, cluster.prefill
        limits = decode.limits
        for number in range(rounds):
            gate = cluster.gates.arm("reserve")
            request = make_request(make_prompt(128, number), f"refused {number}")
            answer = asyncio.create_task(cluster.answer(request))
            await gate.reached()
            await until(lambda: prefill.pool.ledger().blocks.leased == 8)
            decode.limits = replace(limits, vocab_size=4)
            gate.open()
            with pytest.raises(BadRequest, match="outside the vocabulary"):
                await answer
            decode.limits = limits
            await settles(cluster, GONE_S)
        await answers(cluster, PROBE, expected)


# ------------------------------------------------------------------ FC-04: given away too early


@rounds(3, 50)
async def test_fc04_blocks_under_a_write_are_given_to_nobody(rounds: int) -> None:
    """A is aborted in mid-write; B and C need its blocks, and get them after its last write."""
    config = config_of(decode={"num_blocks": 32}, transfer={"cell_bytes": 4096})
    async with GatedCluster(config=config) as cluster:
        (decode,) = cluster.decode
        for number in range(rounds):
            a, b, c = (
                make_request(make_prompt(256, 3 * number + one), f"{one}", max_tokens=32)
                for one in range(3)
            )
            expected = await oracle(b, c)
            gate = cluster.gates.arm("write 1")
            aborted = asyncio.create_task(cluster.answer(a))
            await gate.reached()
            aborted.cancel()
            await asyncio.wait([aborted])
            others = [asyncio.create_task(cluster.answer(one)) for one in (b, c)]
            await until(lambda: decode.pool.ledger().blocks.quarantined == 18)
            await until(lambda: cluster.prefill[0].pool.ledger().blocks.leased >= 16)
            assert decode.pool.ledger().blocks.quarantined == 18
            assert decode.pool.ledger().blocks.leased == 0
            gate.open()
            assert await asyncio.gather(*others) == expected
            await settles(cluster)


# ------------------------------------------------------------------ FC-06: a hold that expires


async def test_fc06_prefill_keeps_a_prompt_for_as_long_as_decode_has_no_place_for_it() -> None:
    """Others come and go in its pool meanwhile; no clock frees what it holds."""
    busy = make_request(make_prompt(30), "busy", max_tokens=150)
    waits = make_request(make_prompt(128), "waits", max_tokens=12)
    passing = [make_request(make_prompt(100, n), f"passing {n}", max_tokens=1) for n in range(20)]
    expected = await oracle(waits, *passing)
    config = config_of(prefill={"num_blocks": 16}, decode={"num_slots": 1})
    async with GatedCluster(config=config) as cluster:
        gate = cluster.gates.arm("token 2")  # it has the only slot until the test lets it go on
        running = asyncio.create_task(cluster.answer(busy))
        await gate.reached()
        timeline = Timeline()
        waiting = asyncio.create_task(cluster.answer(waits, timeline))
        await until(lambda: count([timeline], "refused") > 0)
        (prefill,) = cluster.prefill
        await until(lambda: prefill.status()["homeless_blocks"] == 8)
        assert [await cluster.answer(one) for one in passing] == expected[1:]
        assert prefill.status()["homeless_blocks"] == 8
        gate.open()
        assert len(await running) == 150
        assert await waiting == expected[0]
        assert count([timeline], "lost", "place_lost") == 0
        await settles(cluster)


# ------------------------------------------------------------------ FC-07: decode runs out


@dataclass(frozen=True)
class Crowd:
    """Four requests that need more than twice the blocks that decode has."""

    prompt: int
    max_tokens: int
    num_blocks: int

    @property
    def requests(self) -> list[Request]:
        return [
            make_request(
                make_prompt(self.prompt, n),
                f"crowd {n}",
                max_tokens=self.max_tokens,
                temperature=n % 2,
            )
            for n in range(4)
        ]

    def decode(self, output_reserved: float = 0.0) -> dict[str, Any]:
        return {
            "num_blocks": self.num_blocks,
            "max_length": 1024,
            "output_reserved": output_reserved,
        }

    async def expected(self) -> list[list[int]]:
        if self not in _KNOWN:
            _KNOWN[self] = await oracle(*self.requests)
        return _KNOWN[self]


_KNOWN: dict[Crowd, list[list[int]]] = {}
FEW, WRITTEN = Crowd(48, 70, 16), Crowd(96, 200, 32)
CROWDS = pytest.mark.parametrize(
    "crowd", [FEW, pytest.param(WRITTEN, marks=pytest.mark.full)], ids=["small", "written"]
)


@CROWDS
@pytest.mark.parametrize("colocated", [False, True], ids=["disaggregated", "colocated"])
async def test_fc07a_four_answers_that_do_not_fit_together_all_end_rightly(
    colocated: bool, crowd: Crowd
) -> None:
    config = config_of(decode=crowd.decode(), router={"colocated": colocated})
    async with TinyCluster(config=config) as cluster:
        timelines = [Timeline() for _ in range(4)]
        told = await asyncio.gather(*map(cluster.answer, crowd.requests, timelines))
        assert told == await crowd.expected()
        preempted = [count([timeline], "preempted") for timeline in timelines]
        assert 1 <= sum(preempted) <= 3  # the oldest never
        assert max(preempted) == 1  # nobody twice
        assert count(timelines, "lost", "place_lost") == 0
        assert cluster.decode[0].status()["preempted"] == sum(preempted)
        await settles(cluster)


@CROWDS
async def test_fc07a_by_default_nobody_is_preempted_and_those_who_do_not_fit_wait(
    crowd: Crowd,
) -> None:
    config = config_of(
        decode=crowd.decode(output_reserved=1.0), generation={"reserve_timeout_s": 60.0}
    )
    async with TinyCluster(config=config) as cluster:
        timelines = [Timeline() for _ in range(4)]
        told = await asyncio.gather(*map(cluster.answer, crowd.requests, timelines))
        assert told == await crowd.expected()
        assert count(timelines, "preempted") == 0
        assert count(timelines, "refused") > 0


async def test_fc07b_what_can_never_fit_is_refused_at_once_and_nobody_else_notices() -> None:
    config = config_of(decode=WRITTEN.decode(), prefill={"max_length": 1024})
    async with TinyCluster(config=config) as cluster:
        running = asyncio.create_task(cluster.answer(FEW.requests[0]))
        with pytest.raises(PromptTooLong, match="600") as caught:
            await cluster.answer(make_request(make_prompt(400), "never", max_tokens=200))
        assert "512" in str(caught.value)
        assert len(await running) == FEW.max_tokens
        await settles(cluster)


@rounds(1, 20)
async def test_fc07c_one_that_is_aborted_while_it_is_preempted_leaves_nothing(rounds: int) -> None:
    requests, expected = FEW.requests, await FEW.expected()
    async with TinyCluster(config=config_of(decode=FEW.decode())) as cluster:
        for _ in range(rounds):
            timelines = [Timeline() for _ in requests]
            tasks = [
                asyncio.create_task(cluster.answer(*one))
                for one in zip(requests, timelines, strict=True)
            ]
            await until(lambda: count(timelines, "preempted") > 0)  # noqa: B023
            (victim, *_) = [n for n, one in enumerate(timelines) if count([one], "preempted")]
            tasks[victim].cancel()
            await asyncio.wait(tasks)
            for number, task in enumerate(tasks):
                assert number == victim or task.result() == expected[number]
            await settles(cluster)
