"""Short prompts are run by decode itself: no handoff, the same tokens, neighbours go on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from torch import Tensor

from cluster.generation import Timeline
from cluster.messages import Request
from model.batch import ForwardBatch
from model.cache import Cache
from tests.plain_loop import straight
from tests.tiny import StateModel, TinyCluster, load_tiny, make_prompt, make_request, tiny_config

LOCAL = 33
ENGINE = {"num_blocks": 64, "num_slots": 8, "chunk_tokens": 32, "max_length": 512}
CONFIG = tiny_config(router={"local_prefill_tokens": LOCAL})


def path_of(timeline: Timeline) -> str:
    routed = timeline.last("routed")
    assert routed is not None
    return str(routed.detail["path"])


async def test_prompts_up_to_the_threshold_are_local_and_longer_ones_are_handed_over() -> None:
    async with TinyCluster(model=load_tiny(), config=CONFIG) as cluster:
        for length, path in ((1, "local"), (LOCAL, "local"), (LOCAL + 1, "handoff")):
            timeline = Timeline()
            request = make_request(make_prompt(length), max_tokens=5, temperature=1.0, seed=4)
            assert tuple(await cluster.answer(request, timeline)) == straight(request)
            assert path_of(timeline) == path
            assert (timeline.last("handed_over") is None) is (path == "local")
        assert cluster.prefill[0].health().steps == 2  # two chunks of the long one
        assert await cluster.settled()


@pytest.mark.parametrize("missing", ["blocks", "slots"])
async def test_a_decode_rank_without_room_at_once_runs_no_prompt_of_others(missing: str) -> None:
    sizes = {"blocks": {"num_blocks": 7}, "slots": {"num_slots": 1}}[missing]
    config = tiny_config(
        router={"local_prefill_tokens": LOCAL}, decode={"engine": {**ENGINE, **sizes}}
    )
    async with TinyCluster(config=config) as cluster:
        long = make_request(make_prompt(10), "long", max_tokens=90)
        async with aclosing(cluster.caller.generate(long)) as deltas:
            await anext(deltas)
            timeline = Timeline()
            other = make_request(make_prompt(12), "other", max_tokens=4)
            answer = asyncio.create_task(cluster.answer(other, timeline))
            async for _ in deltas:
                pass
        assert len(await answer) == 4
        assert path_of(timeline) == "handoff"
        assert await cluster.settled()


class Rows(StateModel):
    """Notes how many rows each forward has, and of how many requests."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = []

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        self.steps.append(batch.counts_R.tolist())
        return super().forward(batch, cache)


async def test_a_local_prompt_takes_a_bounded_part_of_a_step_that_answers_share() -> None:
    model, beside = Rows(), 5
    config = tiny_config(
        router={"local_prefill_tokens": 4 * LOCAL},
        decode={"engine": {**ENGINE, "beside_tokens": beside}},
    )
    async with TinyCluster(model=model, config=config) as cluster:
        running = make_request(make_prompt(3), "running", max_tokens=300)
        short = make_request(make_prompt(LOCAL), "short", max_tokens=2)
        alone = await cluster.answer(short)
        async with aclosing(cluster.caller.generate(running)) as deltas:
            await anext(deltas)
            model.steps.clear()
            assert await cluster.answer(short) == alone
        shared = [sorted(counts) for counts in model.steps if len(counts) > 1 and max(counts) > 1]
        assert len(shared) >= LOCAL // beside
        assert all(counts == [1, counts[1]] and counts[1] <= beside for counts in shared)
        assert await cluster.settled()


async def test_local_prompts_of_a_burst_are_bounded_and_the_rest_is_handed_over() -> None:
    """The router charges each choice at once, so a burst does not pile up on decode."""
    requests: list[Request] = [
        make_request(make_prompt(16, n), f"burst {n}", max_tokens=3) for n in range(6)
    ]
    async with TinyCluster(config=CONFIG) as cluster:
        timelines = [Timeline() for _ in requests]
        answers = await asyncio.gather(*map(cluster.answer, requests, timelines))
        paths = [path_of(timeline) for timeline in timelines]
        assert paths.count("local") == LOCAL // 16
        assert answers == [await cluster.answer(request) for request in requests]
