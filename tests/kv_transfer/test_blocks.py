"""Leases of blocks and slots: nothing is lost, nothing is owned twice, whatever the order."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cluster.errors import NoRoom, PromptTooLong
from kv_transfer.blocks import BlockPool, Lease
from kv_transfer.holding import Ledger


def test_a_lease_has_blocks_for_its_whole_length_and_one_slot() -> None:
    pool = BlockPool(num_blocks=8, num_slots=2, block_tokens=16)
    with pool.lease(33) as lease:
        assert len(lease.block_ids) == 3
        assert lease.block_table.tolist() == list(lease.block_ids)
        assert lease.slot in range(2)
        assert pool.ledger().blocks == Ledger(free=5, leased=3, quarantined=0, cached=0, total=8)
        assert pool.ledger().slots == Ledger(free=1, leased=1, quarantined=0, cached=0, total=2)
    assert pool.ledger().blocks.free == 8
    assert pool.ledger().slots.free == 2


def test_a_lease_ends_with_an_exception_too() -> None:
    pool = BlockPool(8, 2, 16)
    with pytest.raises(RuntimeError, match="forward"), pool.lease(16):
        raise RuntimeError("forward")
    assert pool.ledger().blocks.free == 8


def test_releasing_twice_gives_back_once() -> None:
    pool = BlockPool(2, 2, 16)
    first = pool.lease(32)
    first.release()
    second = pool.lease(32)
    first.release()  # its old blocks belong to the second by now
    assert second.state == "leased"
    assert pool.ledger().blocks.free == 0


def test_no_room_says_what_is_short_and_takes_nothing() -> None:
    pool = BlockPool(num_blocks=4, num_slots=1, block_tokens=16)
    with pool.lease(17):
        with pytest.raises(NoRoom, match=r"3 blocks \(2 of 4 free\) and 1 slots \(0 of 1 free\)"):
            pool.lease(48)
        assert pool.ledger().blocks.free == 2
    pool.lease(64).release()


def test_what_can_never_fit_is_not_worth_waiting_for() -> None:
    pool = BlockPool(4, 1, 16)
    with pytest.raises(PromptTooLong, match="65 positions do not fit this rank's 4 blocks of 16"):
        pool.lease(65)
    with pytest.raises(ValueError, match="at least one position"):
        pool.lease(0)


def test_quarantined_memory_waits_for_its_owner() -> None:
    pool = BlockPool(4, 2, 16)
    with pool.lease(32) as lease:
        lease.quarantine("prefill-0")
    lease.release()
    assert pool.ledger().blocks == Ledger(free=2, leased=0, quarantined=2, cached=0, total=4)
    assert pool.clear("prefill-1") == 0
    assert pool.clear("prefill-0") == 1
    assert pool.ledger().blocks.free == 4
    assert pool.clear("prefill-0") == 0


def test_clearing_one_lease_leaves_the_owners_others() -> None:
    pool = BlockPool(4, 4, 16)
    one, other, held = pool.lease(16), pool.lease(16), pool.lease(16)
    one.quarantine("prefill-0")
    other.quarantine("prefill-0")
    one.clear()
    one.clear()
    held.clear()  # is not in quarantine: nothing to end
    assert pool.ledger().blocks == Ledger(free=2, leased=1, quarantined=1, cached=0, total=4)


def test_quarantine_comes_too_late_for_released_memory() -> None:
    lease = BlockPool(4, 4, 16).lease(16)
    lease.release()
    with pytest.raises(AssertionError):
        lease.quarantine("prefill-0")


def test_unbalanced_books_are_noticed() -> None:
    with pytest.raises(AssertionError):
        Ledger(free=1, leased=1, quarantined=0, cached=0, total=3).check()


def test_a_lease_grows_by_whole_blocks_and_gives_all_of_them_back() -> None:
    pool = BlockPool(num_blocks=4, num_slots=2, block_tokens=16)
    lease = pool.lease(10)
    lease.extend(16)
    assert (len(lease.block_ids), lease.length) == (1, 16)
    lease.extend(33)
    assert lease.block_table.tolist() == list(lease.block_ids)
    assert (len(set(lease.block_ids)), lease.length) == (3, 33)
    lease.extend(20)  # it has that already
    assert lease.length == 33
    lease.release()
    assert pool.ledger().blocks.free == 4
    with pytest.raises(AssertionError):
        lease.extend(64)


def test_who_could_not_grow_comes_before_everybody_who_wants_to_begin() -> None:
    pool = BlockPool(num_blocks=3, num_slots=4, block_tokens=16)
    grows, other = pool.lease(16), pool.lease(32)
    with pytest.raises(NoRoom, match="1 more blocks"):
        grows.extend(17)
    assert (len(grows.block_ids), grows.length) == (1, 16)
    other.release()
    with pytest.raises(NoRoom):
        pool.lease(1)
    grows.extend(17)
    pool.lease(16).release()
    with pytest.raises(NoRoom):
        grows.extend(64)
    grows.release()  # it does not want to grow any more
    pool.lease(48).release()


def test_threads_never_own_the_same_block() -> None:
    pool = BlockPool(num_blocks=8, num_slots=8, block_tokens=16)
    owned: set[int] = set()
    clashes: list[int] = []
    lock = threading.Lock()

    def churn() -> None:
        for _ in range(300):
            try:
                lease = pool.lease(32)
            except NoRoom:
                continue
            with lock:
                clashes.extend(owned.intersection(lease.block_ids))
                owned.update(lease.block_ids)
            with lock:
                owned.difference_update(lease.block_ids)
            lease.release()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pool.ledger().blocks.free == 8


class PoolMachine(RuleBasedStateMachine):
    """Any order of leases, releases, quarantines and clearings."""

    NUM_BLOCKS, NUM_SLOTS, OWNERS = 10, 4, ("p0", "p1")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, self.NUM_SLOTS, 4)
        self.held: dict[int, Lease] = {}
        self.quarantined: dict[int, tuple[Lease, str]] = {}
        self.ids: set[int] = set()

    @rule(target=leases, length=st.integers(1, 24))
    def lease(self, length: int) -> Lease | None:
        wanted = -(-length // 4)
        live = [*self.held.values(), *(lease for lease, _ in self.quarantined.values())]
        used = sum(len(lease.block_ids) for lease in live)
        try:
            lease = self.pool.lease(length)
        except NoRoom:
            assert used + wanted > self.NUM_BLOCKS or len(live) == self.NUM_SLOTS
            return None
        assert len(lease.block_ids) == wanted
        assert lease.id not in self.ids
        self.ids.add(lease.id)
        self.held[lease.id] = lease
        return lease

    @rule(lease=leases, more=st.integers(1, 6))
    def extend(self, lease: Lease | None, more: int) -> None:
        """One that cannot grow is preempted: it would keep newcomers out for ever."""
        if lease is None or lease.id not in self.held:
            return
        try:
            lease.extend(lease.length + more)
        except NoRoom:
            lease.release()
            del self.held[lease.id]
        else:
            assert len(lease.block_ids) == -(-lease.length // 4)

    @rule(lease=leases)
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.release()
            self.held.pop(lease.id, None)

    @rule(lease=consumes(leases), owner=st.sampled_from(OWNERS))
    def quarantine(self, lease: Lease | None, owner: str) -> None:
        if lease is not None and lease.id in self.held:
            lease.quarantine(owner)
            self.quarantined[lease.id] = self.held.pop(lease.id), owner

    @rule(owner=st.sampled_from(OWNERS))
    def clear(self, owner: str) -> None:
        gone = [id for id, (_, name) in self.quarantined.items() if name == owner]
        assert self.pool.clear(owner) == len(gone)
        for id in gone:
            del self.quarantined[id]

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        ledger = self.pool.ledger()
        ledger.check()
        held = list(self.held.values())
        quarantined = [lease for lease, _ in self.quarantined.values()]
        blocks = [block for lease in held + quarantined for block in lease.block_ids]
        slots = [lease.slot for lease in held + quarantined]
        assert len(set(blocks)) == len(blocks)
        assert len(set(slots)) == len(slots)
        assert ledger.blocks.leased == sum(len(lease.block_ids) for lease in held)
        assert ledger.slots.leased == len(held)
        assert ledger.slots.quarantined == len(quarantined)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
