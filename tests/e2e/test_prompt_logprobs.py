"""Log-probabilities of a prompt: the same on two ranks and on one, once each after a loss."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

from torch import Tensor

from cluster.generation import Timeline
from cluster.messages import Request, TokenLogprobs
from engine.runner import Model
from model.batch import ForwardBatch
from model.cache import Cache
from model.spec import ModelSpec
from tests.plain_loop import straight
from tests.tiny import TinyCluster, load_tiny, make_prompt, make_request, until

PROMPT = make_prompt(70)  # 32 positions a chunk
REQUEST = make_request(PROMPT, max_tokens=2, prompt_logprobs=2)


class Pausing:
    """The tiny model; stops once, before the chunk that begins at position `start`."""

    def __init__(self) -> None:
        self.start: int | None = None
        self.reached = threading.Event()
        self.go_on = threading.Event()

    @property
    def spec(self) -> ModelSpec:
        return load_tiny().spec

    @property
    def vision(self) -> None:
        return None

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        if int(batch.starts_R[0]) == self.start and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(20)
        return load_tiny().forward(batch, cache)


async def ask(
    cluster: TinyCluster,
    request: Request,
    timeline: Timeline | None = None,
    scored: list[TokenLogprobs] | None = None,
    *,
    colocated: bool = False,
) -> tuple[list[TokenLogprobs], list[int]]:
    """Of the prompt, into `scored` too, and the answer; nothing of the prompt after a token."""
    scored = [] if scored is None else scored
    tokens = list[int]()
    async for delta in cluster.caller.generate(request, timeline, colocated=colocated):
        assert not (delta.prompt_logprobs and (tokens or delta.token_ids))
        scored += delta.prompt_logprobs
        tokens += delta.token_ids
    return scored, tokens


async def lose_prefill(
    cluster: TinyCluster, model: Pausing, timeline: Timeline, scored: list[TokenLogprobs]
) -> None:
    """The rank at work is gone, without a word, when the caller has got what precedes."""
    assert await asyncio.to_thread(model.reached.wait, 20)
    await until(lambda: len(scored) == 64)
    routed = timeline.last("routed")
    assert routed is not None
    (rank,) = (one for one in cluster.prefill if one.name == routed.detail["prefill"])
    going = asyncio.create_task(cast(Any, rank)._life.aclose())
    await until(lambda: timeline.last("lost") is not None)
    model.go_on.set()
    await going


async def test_two_ranks_say_what_one_says_and_a_lost_one_is_not_heard_twice() -> None:
    model, timeline, scored = Pausing(), Timeline(), list[TokenLogprobs]()
    async with TinyCluster(prefill=2, model=cast(Model, model)) as cluster:
        expected, tokens = await ask(cluster, REQUEST)
        assert tuple(tokens) == straight(REQUEST)
        assert len(expected) == len(PROMPT) - 1
        steps = [rank.health().steps for rank in cluster.prefill]
        assert await ask(cluster, REQUEST, colocated=True) == (expected, tokens)
        assert [rank.health().steps for rank in cluster.prefill] == steps

        model.start = 64
        (_, after), _ = await asyncio.gather(
            ask(cluster, REQUEST, timeline, scored), lose_prefill(cluster, model, timeline, scored)
        )
    assert [event.name for event in timeline.events].count("lost") == 1
    assert (scored, after) == (expected, tokens)
