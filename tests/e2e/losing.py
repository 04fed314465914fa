"""A decode rank that is lost in mid-answer, at a token that the test chooses."""

from __future__ import annotations

import asyncio
import threading

from torch import Tensor

from cluster.generation import Timeline
from cluster.messages import Request, TokenLogprobs
from model.batch import ForwardBatch
from model.cache import Cache
from tests.tiny import StateModel, TinyCluster, make_prompt, until

PROMPT = make_prompt(40)

Answer = tuple[list[int], list[TokenLogprobs]]


class Pausing(StateModel):
    """Stops once, when it is to compute what comes after so many output tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._last = len(PROMPT) + tokens - 1
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        if int(batch.positions_T[-1]) == self._last and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(20)
        return super().forward(batch, cache)


async def ask(cluster: TinyCluster, request: Request, timeline: Timeline | None = None) -> Answer:
    token_ids, logprobs = list[int](), list[TokenLogprobs]()
    async for delta in cluster.deltas(request, timeline):
        token_ids += delta.token_ids
        logprobs += delta.logprobs
    return token_ids, logprobs


async def lose_decode(cluster: TinyCluster, model: Pausing, timeline: Timeline) -> None:
    """The rank at work is gone, without a word, while it computes."""
    assert await asyncio.to_thread(model.reached.wait, 20)
    reserved = timeline.last("reserved")
    assert reserved is not None
    (rank,) = (one for one in cluster.decode if one.name == reserved.detail["decode"])
    going = asyncio.create_task(rank._life.aclose())
    await until(lambda: timeline.last("lost") is not None)
    model.go_on.set()
    await going
