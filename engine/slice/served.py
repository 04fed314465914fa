"""Decode steps as the engine makes them: its loop, its graphs, one step begun while another runs.

What the device alone takes for such a step is measured beside it, so that what the host adds shows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cluster.messages import Request, Sampling, pack_ids
from engine.decode_shapes import DecodeShapes
from engine.decode_steps import DecodeSteps
from engine.executor import Executor
from engine.packed_runner import PackedRunner
from engine.request import Running
from engine.schedule import fill
from engine.step_loop import News, StepLoop
from kernels import measure
from kv_transfer.blocks import BlockPool
from model.packed.rows import Shape

if TYPE_CHECKING:
    from engine.slice.run import Slice

_TOGETHER = 5
_FIRST = 8  # steps that are not counted: graphs are captured, run-ahead begins


@dataclass(frozen=True)
class Served:
    """Microseconds of one step."""

    requests: int
    context: int
    wall: float  # from one step's tokens to the next one's
    device: float  # its graph alone, one after another
    host: float  # that the engine's thread was busy in the executor

    @property
    def exposed(self) -> float:
        """The share of a step in which the device waits for the host."""
        return max(0.0, 1 - self.device / self.wall)


class _Listener:
    """When each step's news came, and how long the executor had been busy by then."""

    def __init__(self, requests: int, executor: Executor) -> None:
        self._left, self._executor = requests, executor
        self.times: list[tuple[float, float]] = []
        self.done = threading.Event()

    def __call__(self, news: Sequence[News]) -> None:
        if any(one.choice is not None for one in news):
            busy = self._executor.steps_s - self._executor.waited_s
            self.times.append((time.perf_counter(), busy))
        self._left -= sum(one.end is not None for one in news)
        if not self._left:
            self.done.set()


def serve(one: Slice, requests: int, context: int, steps: int, block_tokens: int) -> Served:
    """`steps` tokens of each request, after `context` positions of state that is there already."""
    longest = context + _FIRST + steps + 1
    blocks = -(-longest // block_tokens)
    pool = BlockPool(requests * blocks, requests, block_tokens)
    spelled = one.spec.image_token_id  # no answer may name a picture
    decoder = DecodeSteps(
        one.model,
        one.state.memory,
        DecodeShapes(requests, blocks),
        name="slice",
        spelled_ids=spelled,
    )
    executor = Executor(
        PackedRunner(one.model, one.state.memory), spelled_ids=spelled, decoder=decoder
    )
    listener = _Listener(requests, executor)
    loop = StepLoop(
        schedule=lambda progress: fill(progress, requests),
        execute=executor,
        deliver=listener,
        settle=executor.settle,
        name="slice",
    )
    shape = decoder.player.choose(DecodeShapes(requests, blocks).of(requests, blocks))
    prompt = [number % (spelled - 3) + 3 for number in range(context + 1)]
    for number in range(requests):
        request = Request(
            request_id=f"r{number}",
            prompt=pack_ids(prompt),
            sampling=Sampling(max_tokens=_FIRST + steps, temperature=0.0, ignore_stop=True),
        )
        loop.add(Running(request, pool.lease(longest), list(prompt), done=context))
    loop.start()
    if not listener.done.wait(timeout=120):
        raise RuntimeError(f"the engine's loop did not end: {loop.death!r}")
    loop.stop(timeout_s=10)
    if loop.death is not None:
        raise loop.death
    (began_at, busy), *_, (ended_at, more_busy) = listener.times[_FIRST - 1 :]
    count = len(listener.times) - _FIRST
    wall, host = (ended_at - began_at) / count, (more_busy - busy) / count
    with torch.inference_mode():
        device = _alone(decoder, one, shape)
    return Served(requests, context, wall * 1e6, device * 1e6, host * 1e6)


def _alone(decoder: DecodeSteps, one: Slice, shape: Shape) -> float:
    """Seconds of a step as it is played, without tokens being read."""

    def several() -> None:
        for _ in range(_TOGETHER):
            decoder.player.play(shape)

    if one.device.type == "cuda":
        return measure.median(several, 10) / _TOGETHER
    begin = time.perf_counter()
    several()
    return (time.perf_counter() - begin) / _TOGETHER
