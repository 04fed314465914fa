"""Blocks go to those who wait in order of arrival, and come back however a waiter leaves."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import NoRoom
from engine.admission import Admission
from kv_transfer.blocks import BlockPool


class Visitor:
    """Somebody who waits for blocks and keeps them until told to leave."""

    def __init__(self, admission: Admission, length: int) -> None:
        self._admission = admission
        self.length = length
        self.inside = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit())

    async def _visit(self) -> None:
        async with self._admission.lease(self.length):
            self.inside.set()
            await self.leave.wait()


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=4, num_slots=4, block_tokens=16)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_came_first_is_served_first_even_if_later_ones_would_fit(pool: BlockPool) -> None:
    admission = Admission(pool, max_waiting=9)
    first, big, small = (Visitor(admission, length) for length in (40, 30, 10))
    await settle()
    assert [v.inside.is_set() for v in (first, big, small)] == [True, False, False]
    assert (admission.waiting, admission.waiting_tokens) == (2, 40)
    with pytest.raises(NoRoom):
        admission.lease_now(10)  # there is a free block, but somebody waits for it
    first.leave.set()
    await settle()
    assert [v.inside.is_set() for v in (big, small)] == [True, True]
    for visitor in (big, small):
        visitor.leave.set()
    await settle()
    assert pool.ledger().blocks.free == 4


async def test_a_waiter_that_leaves_lets_the_next_one_in(pool: BlockPool) -> None:
    admission = Admission(pool, max_waiting=9)
    first, big, small = (Visitor(admission, length) for length in (40, 64, 10))
    await settle()
    big.task.cancel()
    await settle()
    assert small.inside.is_set()
    for visitor in (first, small):
        visitor.leave.set()
    await settle()
    assert pool.ledger().blocks.free == 4


@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_blocks_given_to_a_waiter_that_is_just_leaving_are_not_lost(
    pool: BlockPool, cancelled_first: bool
) -> None:
    admission = Admission(pool, max_waiting=9)
    held = admission.lease_now(64)
    waiter = Visitor(admission, 20)
    await settle()
    if cancelled_first:
        waiter.task.cancel()
        admission.release(held)
    else:
        admission.release(held)
        waiter.task.cancel()
    await settle()
    assert not waiter.inside.is_set()
    assert pool.ledger().blocks.free == 4
    assert admission.waiting == 0


async def test_nobody_gets_in_while_it_is_closed_and_too_many_are_refused(pool: BlockPool) -> None:
    is_open = False
    admission = Admission(pool, max_waiting=1, is_open=lambda: is_open)
    visitor = Visitor(admission, 10)
    await settle()
    assert not visitor.inside.is_set()
    with pytest.raises(NoRoom) as caught:
        async with admission.lease(10):
            pass
    assert caught.value.retry_after_s
    is_open = True
    admission.admit()
    await settle()
    assert visitor.inside.is_set()
    visitor.leave.set()
    await settle()
