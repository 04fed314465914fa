"""Field cases FC-08, 10, 11 and 53: a rank fails or dies, and everybody else goes on."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.errors import ClusterError
from cluster.generation import Timeline
from tests.faults.field_cases import ANSWER_S, answers, count, oracle, rounds, settles
from tests.faults.gates import GatedCluster
from tests.tiny import StateModel, make_prompt, make_request, tiny_config, until

CONFIG = tiny_config(wire={"heartbeat_s": 0.2, "t_detect_s": 1.0})
PROBE = make_request(make_prompt(20), "probe", max_tokens=4)


@rounds(4, 20)
async def test_fc08_prefill_fails_on_one_prompt_while_decode_waits_for_it(rounds: int) -> None:
    """The client hears of it at once, from prefill's own words, and gets no token."""
    async with GatedCluster(config=CONFIG) as cluster:
        expected = await cluster.answer(PROBE)
        for number in range(rounds):
            # the mark is in the last chunk, so that decode is waiting by then
            prompt = [*make_prompt(70, number), StateModel.POISON]
            timeline, seen = Timeline(), list[int]()
            gate = cluster.gates.arm("reserved")
            request = make_request(prompt, f"poisoned {number}")

            async def read(timeline: Timeline = timeline, seen: list[int] = seen) -> None:
                async for delta in cluster.deltas(request, timeline):  # noqa: B023
                    seen += delta.token_ids

            reading = asyncio.create_task(read())
            await gate.reached()
            gate.open()
            started = time.monotonic()
            with pytest.raises(ClusterError, match="prefill-0/0"):
                await reading
            assert time.monotonic() - started < 1.0 + ANSWER_S / 4  # the case says 1 s, alone
            assert not seen
            await settles(cluster)
        await answers(cluster, PROBE, expected)


@rounds(1, 5)
async def test_fc10_prefill_dies_in_mid_prompt_and_its_next_life_serves(rounds: int) -> None:
    """Decode stays what it was, drops the old life, and pairs with the new one."""
    long = make_request(make_prompt(200), "long", max_tokens=3)
    five = [make_request(make_prompt(40, n), f"after {n}", max_tokens=4) for n in range(5)]
    expected = await oracle(long, *five)
    async with GatedCluster(config=CONFIG) as cluster:
        (decode,) = cluster.decode
        for _ in range(rounds):
            gate, timeline = cluster.gates.arm("pushed 0"), Timeline()
            answer = asyncio.create_task(cluster.answer(long, timeline))
            await gate.reached()
            dying = asyncio.create_task(cluster.kill("prefill-0/0"))
            gate.open()
            await dying
            async with asyncio.timeout(ANSWER_S):
                assert await answer == expected[0], timeline.summary()
                assert [await cluster.answer(one) for one in five] == expected[1:]
            assert cluster.decode[0] is decode
            assert cluster.prefill[0].status()["paired_with"] == ["decode-0/0"]
            await settles(cluster)


@rounds(1, 5)
async def test_fc11_decode_dies_in_mid_stream_and_nobody_sees_a_seam(rounds: int) -> None:
    """Two answers to one prompt, as with n = 2, and one that is not streamed beside them."""
    requests = [
        make_request(make_prompt(60), f"choice {n}", max_tokens=40, temperature=1.0, seed=n)
        for n in range(3)
    ]
    expected = await oracle(*requests)
    async with GatedCluster(decode=2, config=CONFIG) as cluster:
        for _ in range(rounds):
            timelines = [Timeline() for _ in requests]
            seen = list[int]()

            async def stream(timeline: Timeline, seen: list[int]) -> None:
                async for delta in cluster.deltas(requests[0], timeline):
                    assert delta.first == len(seen)
                    seen += delta.token_ids
                    if len(seen) == 10:
                        taken = timeline.last("taken_over")
                        assert taken is not None
                        await cluster.kill(str(taken.detail["decode"]))

            others = [
                asyncio.create_task(cluster.answer(*one))
                for one in zip(requests[1:], timelines[1:], strict=True)
            ]
            async with asyncio.timeout(3 * ANSWER_S):
                await stream(timelines[0], seen)
                assert [seen, *await asyncio.gather(*others)] == expected
            assert count(timelines[:1], "lost") == 1
            await settles(cluster)


async def test_fc53_a_dead_decode_rank_is_never_chosen_again_and_comes_back_cold() -> None:
    """Twenty requests at the moment of its death, twenty when its next life is there."""
    same = [make_request(make_prompt(64), f"warm {n}", max_tokens=2) for n in range(20)]
    (expected,) = await oracle(same[0])
    async with GatedCluster(decode=2, config=CONFIG) as cluster:
        dead = cluster.named("decode-1/0")
        old = dead.incarnation
        for request in same[:4]:
            assert await cluster.answer(request) == expected
        dying = asyncio.create_task(cluster.kill("decode-1/0"))
        await until(
            lambda: all(one.endpoint.incarnation != old for one in cluster.router.members())
        )
        timelines = [Timeline() for _ in same]
        async with asyncio.timeout(3 * ANSWER_S):
            together = await asyncio.gather(*map(cluster.answer, same, timelines))
        assert together == [expected] * 20
        failed = count(timelines, "lost", "place_lost")
        assert failed <= 1, [timeline.summary() for timeline in timelines]
        await dying
        await until(lambda: len(cluster.router.members()) == 3)
        (again,) = [one for one in cluster.router.members() if one.endpoint.name == "decode-1/0"]
        assert again.endpoint.incarnation != old
        assert again.load.running == again.load.waiting == 0
        timelines = [Timeline() for _ in same]
        assert await asyncio.gather(*map(cluster.answer, same, timelines)) == [expected] * 20
        chosen = {
            event.detail["decode"]
            for t in timelines
            for event in t.events
            if "decode" in event.detail
        }
        assert chosen == {"decode-0/0", "decode-1/0"}
        assert count(timelines, "lost", "place_lost") == 0
        await settles(cluster)
