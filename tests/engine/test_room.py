"""Memory that is promised more often than it is there: some answer always runs to its end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import NoRoom
from decode_worker.scheduler import schedule
from engine.request import Running
from engine.room import make_room
from engine.schedule import Grant, Progress
from kv_transfer.blocks import BlockPool, Lease
from tests.tiny import make_request

BLOCK = 4
NUM_BLOCKS = 8


def a_running(
    pool: BlockPool, prompt: int, max_tokens: int, *, done: int = -1, whole: bool = False
) -> Running:
    """One that decodes: its prompt is done, its lease holds that and the next token, or all."""
    request = make_request(range(3, 3 + prompt), max_tokens=max_tokens)
    lease = pool.lease(request.longest if whole else prompt + 1)
    ids = [*request.token_ids, 7]
    return Running(request, lease, ids, prompt if done < 0 else done)


def one_row(running: list[Running]) -> list[Grant]:
    return [Grant(index, one.done, 1, True) for index, one in enumerate(running)]


def test_a_lease_grows_by_a_block_when_its_answer_needs_one() -> None:
    pool = BlockPool(NUM_BLOCKS, 4, BLOCK)
    one = a_running(pool, prompt=7, max_tokens=9)
    for position in range(7, 16):
        room = make_room([one], [Grant(0, position, 1, True)])
        assert room.grants
        assert not room.preempted
        assert len(one.lease.block_ids) == position // BLOCK + 1
    assert not one.grows


def test_the_youngest_gives_way_and_its_blocks_go_to_the_one_that_needs_them() -> None:
    pool = BlockPool(4, 4, BLOCK)
    old, middle, young = (a_running(pool, 3, 12) for _ in range(3))
    hoard = pool.lease(BLOCK)
    old.lease.extend(4)
    old.done = 4  # its next row needs a second block
    running = [old, middle, young]
    room = make_room(running, one_row(running))
    assert room.preempted == [young]
    assert [grant.index for grant in room.grants] == [0, 1]
    assert young.lease.state == "released"
    assert len(old.lease.block_ids) == 2
    hoard.release()


def test_the_one_that_needs_the_memory_may_be_the_youngest_itself() -> None:
    pool = BlockPool(2, 4, BLOCK)
    old, young = a_running(pool, 2, 9), a_running(pool, 3, 12)
    young.lease.extend(4)
    young.done = 4
    room = make_room([old, young], one_row([old, young]))
    assert room.preempted == [young]
    assert [grant.index for grant in room.grants] == [0]


def test_who_holds_all_that_he_can_need_never_gives_way_and_the_oldest_waits_for_him() -> None:
    pool = BlockPool(4, 4, BLOCK)
    old = a_running(pool, 3, 12)
    whole = a_running(pool, 3, 9, whole=True)
    old.lease.extend(4)
    old.done = 4
    room = make_room([old, whole], one_row([old, whole]))
    assert not room.preempted
    assert [grant.index for grant in room.grants] == [1]  # the other one waits
    assert pool.ledger().blocks.free == 0


def test_who_is_inside_gets_free_blocks_before_who_is_not() -> None:
    pool = BlockPool(2, 4, BLOCK)
    old, held = a_running(pool, 3, 4), pool.lease(BLOCK)
    old.done = 4
    assert not make_room([old], one_row([old])).grants
    held.release()
    try:
        newcomer: Lease | None = pool.lease(1)
    except NoRoom:
        newcomer = None
    assert newcomer is None
    assert make_room([old], one_row([old])).grants
    old.lease.release()
    pool.lease(2 * BLOCK).release()  # and then everybody may have some again


# ------------------------------------------------------------------ any load drains


@dataclass
class Wish:
    """One request of the load, as its caller sees it."""

    prompt: int
    max_tokens: int
    emitted: int = 0
    preempted: int = 0


@dataclass
class DecodeRank:
    """Admission, schedule and room of a decode rank, and a model that makes a token a row."""

    part: float
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS, 6, BLOCK))
    running: list[tuple[Wish, Running]] = field(default_factory=list)
    whole: deque[Wish] = field(default_factory=deque)
    turns: int = 0

    def admit(self, fresh: deque[Wish]) -> None:
        """Preempted ones in their turn; nobody new while one of them waits."""
        while self.whole and self._take(self.whole[0], whole=True):
            self.whole.popleft()
        while fresh and not self.whole and self._take(fresh[0], whole=False):
            fresh.popleft()

    def _take(self, wish: Wish, *, whole: bool) -> bool:
        request = make_request(range(3, 3 + wish.prompt), max_tokens=wish.max_tokens)
        request = request.resume_after([7] * wish.emitted)
        try:
            lease = self.pool.lease(request.longest if whole else request.held(self.part))
        except NoRoom:
            return False
        self.running.append((wish, Running(request, lease, request.token_ids)))
        return True

    def step(self) -> None:
        running = [one for _, one in self.running]
        progress = [
            Progress(index, one.done, len(one.token_ids), one.turn)
            for index, one in enumerate(running)
        ]
        grants = schedule(progress, chunk_tokens=8, beside_tokens=4, max_rows=3)
        room = make_room(running, grants)
        gone = {id(one) for one in room.preempted}
        for grant in room.grants:
            one = running[grant.index]
            self.turns += 1
            one.turn, one.done = self.turns, grant.start + grant.count
            assert one.done <= one.lease.length
            if grant.samples and one.append(7) is not None:
                one.lease.release()
                gone.add(id(one))
        for wish, one in self.running:
            wish.emitted = one.output_length
            if any(one is victim for victim in room.preempted):
                wish.preempted += 1
                self.whole.append(wish)
        self.running = [(wish, one) for wish, one in self.running if id(one) not in gone]
        self._check(room.grants)

    def _check(self, grants: list[Grant]) -> None:
        held = [block for _, one in self.running for block in one.lease.block_ids]
        assert len(set(held)) == len(held)
        assert self.pool.ledger().blocks.leased == len(held)
        assert grants, "nobody could run"


wishes = st.builds(Wish, prompt=st.integers(1, 12), max_tokens=st.integers(1, 20))


@given(st.lists(wishes, min_size=1, max_size=12), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_any_load_drains_and_nobody_gives_way_twice(load: list[Wish], part: float) -> None:
    rank, fresh = DecodeRank(part), deque(load)
    steps_left = sum(2 * (wish.prompt + wish.max_tokens) + 2 for wish in load)
    while fresh or rank.whole or rank.running:
        assert steps_left, "it does not drain"
        steps_left -= 1
        rank.admit(fresh)
        rank.step()
    assert all(wish.emitted == wish.max_tokens for wish in load)
    assert max(wish.preempted for wish in load) <= (part < 1.0)
    assert rank.pool.ledger().blocks.free == NUM_BLOCKS
