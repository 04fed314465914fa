"""Step loops of a group: they step together, rest together, leave together, and fail apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import numpy as np

from cluster.errors import WorkerLost
from cluster.expert_placement import Placement
from cluster.placement_file import GroupPlacement
from decode_worker.scheduler import schedule
from engine.expert_exchange import LocalExchange, local_exchanges
from engine.expert_group import ExpertGroup
from engine.expert_slots import ExpertSlots
from engine.lockstep import Lockstep
from engine.request import Broken, Finished, Removed
from engine.step_loop import Execute, Outcome, StepLoop, Work
from tests.engine.loops import POISON, Ears, FakeModel, running


def placement(version: int, *slots: Sequence[int]) -> GroupPlacement:
    return GroupPlacement("g", version, Placement(np.array([slots]), 2))


class FakeExperts:
    """Counts the steps that its rank takes part in; there are no layers."""

    def __init__(self, exchange: LocalExchange, on_step: Callable[[], None]) -> None:
        self.exchange, self._on_step = exchange, on_step
        self.slots = ExpertSlots(placement(0, [0], [1]), index=exchange.index)
        self.steps = self.tables = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        self.steps += 1
        self._on_step()
        yield

    def renew_tables(self) -> None:
        self.tables += 1


class Resting(LocalExchange):
    """Tells when its rank has come to rest, and how often it has agreed."""

    def __init__(self, like: LocalExchange) -> None:
        super().__init__(like._meeting, like.index)
        self.rests = threading.Semaphore(0)

    def rest(self, heard: Callable[[], None]) -> None:
        super().rest(heard)
        self.rests.release()


class Rank:
    """One rank's loop; it has come to rest for the first time."""

    def __init__(self, exchange: LocalExchange, execute: Execute | None = None) -> None:
        self.exchange = Resting(exchange)
        self.beside: list[bool] = []  # in each step, whether other ranks answered
        self.experts = FakeExperts(
            self.exchange, lambda: self.beside.append(self.lockstep.answers_beside)
        )
        self.model, self.ears = FakeModel(), Ears()
        self.lockstep = Lockstep(cast(ExpertGroup, self.experts), execute or self.model)
        self.loop = StepLoop(
            schedule=partial(schedule, chunk_tokens=4, beside_tokens=4, max_rows=8),
            execute=self.lockstep,
            deliver=self.ears,
            name=f"g/{exchange.index}",
            pace=self.lockstep,
        )
        self.loop.start()
        self.comes_to_rest()

    def comes_to_rest(self) -> bool:
        return self.exchange.rests.acquire(timeout=20)


def stop(*ranks: Rank) -> bool:
    """All at the same time, as the head of a group does it."""
    stopping = [threading.Thread(target=rank.loop.stop, args=(20,)) for rank in ranks]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join()
    return not any(rank.loop.alive for rank in ranks)


def group(size: int) -> list[Rank]:
    return [Rank(exchange) for exchange in local_exchanges(size, timeout_s=20)]


def test_one_ranks_work_is_a_step_of_all_and_then_all_rest() -> None:
    ranks = group(3)
    one = running(1, 2, 3, 4, 5)  # two steps for the prompt, three for the other tokens
    ranks[1].loop.add(one)
    assert all(rank.comes_to_rest() for rank in ranks)
    assert ranks[1].ears.tokens(one) == [15, 30, 60, 120]
    assert [rank.experts.steps for rank in ranks] == [5, 5, 5]
    assert [len(rank.model.steps) for rank in ranks] == [0, 5, 0]
    assert [rank.loop.steps for rank in ranks] == [0, 5, 0]
    assert not any(rank.lockstep.awake for rank in ranks)
    assert stop(*ranks)


def test_ranks_with_work_of_their_own_share_their_steps() -> None:
    ranks = group(2)
    ranks[0].loop.add(first := running(2))
    ranks[1].loop.add(second := running(3, max_tokens=9))
    ranks[1].ears.until(lambda: ranks[1].ears.ended(second))
    ranks[0].ears.until(lambda: ranks[0].ears.ended(first))
    assert ranks[0].ears.tokens(first) == [2, 4, 8, 16]
    assert len(ranks[1].ears.tokens(second)) == 9
    assert stop(*ranks)
    assert ranks[0].experts.steps == ranks[1].experts.steps <= 13


def test_a_group_that_has_rested_wakes_again_and_again() -> None:
    ranks = group(2)
    for turn in range(6):
        ranks[turn % 2].loop.add(running(turn + 2, max_tokens=1))
        assert all(rank.comes_to_rest() for rank in ranks)
    assert [rank.experts.steps for rank in ranks] == [6, 6]
    assert stop(*ranks)


def test_a_request_that_fails_is_blamed_on_its_rank_alone() -> None:
    ranks = group(2)
    bad, neighbour = running(POISON), running(4)
    ranks[0].loop.add(bad)
    ranks[1].loop.add(neighbour)
    ranks[0].ears.until(lambda: ranks[0].ears.ended(bad))
    ranks[1].ears.until(lambda: ranks[1].ears.ended(neighbour))
    assert isinstance(ranks[0].ears.end(bad), Broken)
    assert ranks[1].ears.end(neighbour) == Finished("length")
    ranks[0].loop.add(good := running(5))
    ranks[0].ears.until(lambda: ranks[0].ears.ended(good))
    assert ranks[0].ears.end(good) == Finished("length")
    assert stop(*ranks)


def test_a_rank_that_goes_ends_the_loops_of_all_and_no_request_is_blamed() -> None:
    met, gone = threading.Event(), threading.Event()

    def execute(work: Sequence[Work]) -> list[None]:
        met.set()
        assert gone.wait(20)
        return [None] * len(work)

    here, there = local_exchanges(2, timeout_s=20)
    rank, other = Rank(here, execute), Rank(there)
    rank.loop.add(one := running(7))
    assert met.wait(20)
    other.exchange.close()
    gone.set()
    rank.ears.until(lambda: rank.ears.ended(one))
    end = rank.ears.end(one)
    assert isinstance(end, Broken)
    assert isinstance(end.error, WorkerLost)
    for each in (rank, other):
        each.loop._thread.join(20)
        assert not each.loop.alive


def test_a_rank_that_leaves_takes_part_until_all_leave() -> None:
    go_on, model = threading.Event(), FakeModel()

    def execute(work: Sequence[Work]) -> list[Outcome]:
        if len(model.steps) > 3:
            assert go_on.wait(20)
        return model(work)

    here, there = local_exchanges(2, timeout_s=20)
    rank, leaving = Rank(here, execute), Rank(there)
    rank.loop.add(one := running(2, max_tokens=9))
    assert not leaving.loop.stop(0.01)
    go_on.set()
    rank.ears.until(lambda: rank.ears.ended(one))
    assert rank.ears.end(one) == Finished("length")
    assert rank.comes_to_rest()
    assert rank.experts.steps == leaving.experts.steps == 9
    assert stop(rank, leaving)


def test_a_group_leaves_with_requests_that_are_handed_back() -> None:
    ranks = group(2)
    ranks[0].loop.add(endless := running(2, max_tokens=10_000))
    ranks[0].ears.until(lambda: len(ranks[0].ears.tokens(endless)) > 3)
    assert stop(*ranks)
    assert ranks[0].ears.end(endless) == Removed()


def test_a_placement_is_used_when_all_ranks_have_it_and_not_before() -> None:
    ranks = group(2)
    wanted = placement(1, [1], [0])
    ranks[0].experts.slots.offer(wanted)
    assert all(rank.comes_to_rest() for rank in ranks)  # they have talked about it
    assert [rank.experts.slots.placed.version for rank in ranks] == [0, 0]
    ranks[1].experts.slots.offer(wanted)
    assert all(rank.comes_to_rest() for rank in ranks)
    assert [rank.experts.slots.placed.version for rank in ranks] == [1, 1]
    assert [rank.experts.tables for rank in ranks] == [1, 1]
    assert stop(*ranks)


def test_two_placements_of_one_version_are_never_mixed() -> None:
    ranks = group(2)
    ranks[0].experts.slots.offer(placement(1, [1], [0]))
    ranks[1].experts.slots.offer(placement(1, [0], [1]))
    ranks[0].loop.add(one := running(2))
    ranks[0].ears.until(lambda: ranks[0].ears.ended(one))
    assert [rank.experts.slots.placed.version for rank in ranks] == [0, 0]
    assert stop(*ranks)


def test_ranks_know_whether_others_answer() -> None:
    ranks = group(2)
    ranks[0].loop.add(running(2, 3, max_tokens=3))
    assert all(rank.comes_to_rest() for rank in ranks)
    assert [rank.beside for rank in ranks] == [[False, False, False], [False, True, True]]
    assert [rank.lockstep.answers_beside for rank in ranks] == [False, False]
    assert stop(*ranks)
