"""The engine as asyncio sees it, over a model that the test holds by a gate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial

import pytest

from cluster.errors import WorkerLost
from cluster.messages import Request
from decode_worker.scheduler import schedule
from engine.choice import Choice
from engine.engine import Engine
from engine.request import Finished
from engine.step_loop import Outcome, Work
from kv_transfer.blocks import BlockPool, Lease
from tests.tiny import make_request, until


class Gate:
    """A model whose next id is always 7 and whose steps wait to be let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, work: Sequence[Work]) -> list[Outcome]:
        self.entered.set()
        assert self.open.wait(10)
        return [Choice(7) if one.grant.samples else None for one in work]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def lease() -> Lease:
    return BlockPool(8, 1, 16).lease(100)


def engine_of(gate: Gate) -> Engine:
    return Engine(
        schedule=partial(schedule, chunk_tokens=8, beside_tokens=8, max_rows=4),
        execute=gate,
        eos_token_id=1,
        name="test",
    )


def request(max_tokens: int = 4) -> Request:
    return make_request(range(3, 15), max_tokens=max_tokens)


async def test_tokens_come_as_they_are_made_and_several_at_once_to_a_slow_reader(
    gate: Gate, lease: Lease
) -> None:
    gate.open.set()
    async with engine_of(gate) as engine, engine.run(request(), lease) as run:
        await run.until(lambda: run.end is not None)
        assert [some async for some in run.tokens()] == [(Choice(7),) * 4]
        assert run.end == Finished("length")
        assert run.done == 15  # the last token's own state is nobody's need


async def test_a_run_is_left_only_when_the_engine_has_let_go_of_it(
    gate: Gate, lease: Lease
) -> None:
    left = asyncio.Event()

    async def visit(engine: Engine) -> None:
        async with engine.run(request(100), lease) as run:
            await run.until(lambda: run.started)
            await asyncio.Event().wait()

    async with engine_of(gate) as engine:
        task = asyncio.create_task(visit(engine))
        task.add_done_callback(lambda _: left.set())
        await asyncio.to_thread(gate.entered.wait, 10)
        for _ in range(3):  # impatience changes nothing
            task.cancel()
            await asyncio.sleep(0)
        assert not left.is_set()
        assert engine.health().pending == 1
        gate.open.set()
        await left.wait()
        assert task.cancelled()
        assert engine.health().pending == 0


async def test_an_engine_that_stops_tells_those_who_wait(gate: Gate, lease: Lease) -> None:
    engine = engine_of(gate)
    async with engine:
        visit = asyncio.create_task(_answer(engine, lease, max_tokens=10**6))
        await asyncio.to_thread(gate.entered.wait, 10)
        gate.open.set()
    with pytest.raises(WorkerLost, match="stopped"):
        await visit
    assert not engine.health().alive
    with pytest.raises(WorkerLost, match="not running"):
        await _answer(engine, lease)


async def test_health_tells_how_long_nothing_has_moved_while_something_waits(
    gate: Gate, lease: Lease
) -> None:
    async with engine_of(gate) as engine:
        assert engine.health().stuck_s == 0.0
        visit = asyncio.create_task(_answer(engine, lease))
        await asyncio.to_thread(gate.entered.wait, 10)
        await until(lambda: engine.health().stuck_s > 0.05)
        assert engine.health().alive
        gate.open.set()
        assert await visit == [7] * 4
        assert engine.health().stuck_s == 0.0
        assert engine.health().steps == 5


async def _answer(engine: Engine, lease: Lease, max_tokens: int = 4) -> list[int]:
    async with engine.run(request(max_tokens), lease) as run:
        return [choice.token async for choices in run.tokens() for choice in choices]
