"""Each fault at each step of the hand-over: the right answer, in time, and all memory back.

Two prefill and two decode ranks in this process, with gates between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from _pytest.mark import ParameterSet

from cluster.config import ClusterConfig
from cluster.generation import Timeline
from kv_transfer.open_transport import open_paths
from tests.faults.gates import Gate, GatedCluster, GatedDecode, Verdict
from tests.planned_paths import open_planned_paths
from tests.tiny import make_prompt, make_request, tiny_config, until

STEPS = (
    "prefill",
    "started",
    "reserve",
    "reserved",
    "push_to",
    "connect",
    "connected",
    "open_push",
    "push_opened",
    "write 0",
    "pushed 0",
    "unpacked 0",
    "write 3",
    "pushed 3",
    "unpacked 3",
    "commit",
    "accepted",
    "handed_over",
    "token 0",
    "token 1",
    "token 3",
)
FAULTS = ("held", "caller leaves", "cut decode", "cut prefill", "kill decode", "kill prefill")
DAMAGES: tuple[tuple[str, Verdict], ...] = (
    ("write 0", "fail"),
    ("write 3", "fail"),
    ("write 0", "drop"),
    ("write 3", "drop"),
    ("write 0", "corrupt"),
    ("write 3", "corrupt"),
    ("pushed 0", "swap"),
    ("commit", "corrupt"),
)
PATHS = {"packed": "local/memcpy", "planned": "local/memcpy", "direct": "host/cma"}
EVERY_PATH = pytest.mark.parametrize("path", PATHS)
ANSWER_S = 8.0  # for an answer over one fault: detection, and a prompt of three chunks again
POISON = 0xA5
LEDGER_S = 5.0
CANCEL_S = 2.0  # from a caller's leaving, and its writes' end, to the last sign of work

DIRECT_STEPS = tuple(step for step in STEPS if not step.startswith("unpacked"))
ALWAYS = {  # the others in the long form
    "planned": ("write 0", "write 3", "unpacked 0", "commit"),
    "direct": ("open_push", "write 0", "write 3", "commit"),
}


def config_of(path: str) -> ClusterConfig:
    return tiny_config(
        wire={"heartbeat_s": 0.2, "t_detect_s": 1.0},
        transfer={
            "path": "direct" if path == "direct" else "packed",
            "cell_bytes": 4096,  # so that there are more pushes than cells
        },
    )


CONFIG = config_of("packed")
REQUEST = make_request(make_prompt(70), "gated", max_tokens=6, temperature=1.0, seed=3)
OTHERS = [make_request(make_prompt(70, seed), f"other {seed}", max_tokens=4) for seed in (1, 2)]


class Case:
    """One cluster, and what its answers are when nothing goes wrong."""

    def __init__(self, cluster: GatedCluster) -> None:
        self.cluster = cluster

    async def learn(self) -> None:
        self.expected = await self.cluster.answer(REQUEST)
        self.others = [await self.cluster.answer(other) for other in OTHERS]

    async def hold_at(self, step: str) -> None:
        """A request of ours, on its way, stands before that step."""
        self.timeline = Timeline()
        self.gate: Gate = self.cluster.gates.arm(step)
        self.answer = asyncio.create_task(self.cluster.answer(REQUEST, self.timeline))
        await self.gate.reached()

    def rank(self, role: str) -> str:
        """The one that works for the request now."""
        event = self.timeline.last("reserved") if role == "decode" else None
        event = event or self.timeline.last("routed")
        assert event is not None
        return str(event.detail[role])

    async def ends_well(self) -> None:
        """The right answer, and afterwards nothing is held anywhere."""
        async with asyncio.timeout(ANSWER_S):
            assert await self.answer == self.expected, self.timeline.summary()
        await self.gives_all_back()

    async def gives_all_back(self, within_s: float = LEDGER_S) -> None:
        async with asyncio.timeout(within_s):
            await self.cluster.settled()

    async def others_are_served(self) -> None:
        async with asyncio.timeout(ANSWER_S):
            answers = await asyncio.gather(*map(self.cluster.answer, OTHERS))
        assert answers == self.others


@pytest.fixture
def path() -> str:
    return "packed"


@pytest.fixture
async def case(path: str) -> AsyncIterator[Case]:
    transport = open_planned_paths if path == "planned" else open_paths
    made = GatedCluster(prefill=2, decode=2, config=config_of(path), transport=transport)
    async with made as cluster:
        case = Case(cluster)
        await case.learn()
        assert cluster.prefill[0].status()["path"] == PATHS[path]
        yield case


async def _forget_pairs(case: Case) -> None:
    """So that "connect" is a step of the next request: new lives have nobody paired with them."""
    for rank in list(case.cluster.decode):
        await case.cluster.kill(rank.name)
    await until(lambda: len(case.cluster.router.members()) == 4)


def _steps() -> Iterator[ParameterSet]:
    for step in STEPS:
        yield pytest.param("packed", step)
    for path, steps in (("planned", STEPS), ("direct", DIRECT_STEPS)):
        for step in steps:
            marks = () if step in ALWAYS[path] else (pytest.mark.full,)
            yield pytest.param(path, step, marks=marks)


@pytest.mark.parametrize(("path", "step"), list(_steps()))
async def test_every_fault_at(step: str, case: Case) -> None:
    cluster = case.cluster
    pairing = step.startswith("connect")  # which all pushes of two ranks wait for
    for fault in FAULTS:
        print(fault)  # shown if it fails
        if pairing:
            await _forget_pairs(case)
        await case.hold_at(step)
        verb, _, whom = fault.partition(" ")
        match verb:
            case "held":
                pass
            case "caller":
                case.answer.cancel()
                await asyncio.wait([case.answer])
            case "cut":
                cluster.cut(case.rank(whom))
            case "kill":
                dying = asyncio.create_task(cluster.kill(case.rank(whom)))
                await asyncio.sleep(0)
                case.gate.open("fail" if step.startswith("write") else "pass")
                await dying
        if not pairing:  # what stands still meanwhile is in nobody's way
            await case.others_are_served()
        case.gate.open()
        if verb == "caller":
            await case.gives_all_back(CANCEL_S)
        else:
            await case.ends_well()


@EVERY_PATH
@pytest.mark.parametrize(("step", "verdict"), DAMAGES)
async def test_what_does_not_arrive_as_it_left_is_never_continued(
    step: str, verdict: Verdict, case: Case
) -> None:
    for rank in case.cluster.decode:  # what an earlier answer left would hide that nothing came
        rank.slab.blocks.fill_(POISON)
        rank.slab.slots.fill_(POISON)
    await case.hold_at(step)
    case.gate.open(verdict)
    await case.ends_well()
    lost = case.timeline.last("lost") or case.timeline.last("place_lost")
    assert lost is not None, "the damage was not noticed"


async def test_a_write_that_lands_long_after_its_reservation_harms_nobody(case: Case) -> None:
    """Its sender was cut off, so the segment was given to others; the content it finds is theirs.

    What it overwrites before it is unpacked shows in the digest; nothing else is ever read.
    """
    await case.hold_at("write 1")
    late, decode = case.gate, case.rank("decode")
    case.cluster.cut(case.rank("prefill"))
    async with asyncio.timeout(ANSWER_S):
        await asyncio.wait([case.answer])
    assert await case.answer == case.expected
    ring = case.cluster.named(decode)
    assert isinstance(ring, GatedDecode)
    assert ring.ring.ledger().quarantined == 0
    next_up = case.cluster.gates.arm("unpacked 0")
    answers = [asyncio.create_task(case.cluster.answer(other)) for other in OTHERS]
    await next_up.reached()
    late.open()
    next_up.open()
    async with asyncio.timeout(ANSWER_S):
        assert await asyncio.gather(*answers) == case.others
    await case.gives_all_back()


@EVERY_PATH
async def test_a_caller_who_leaves_in_mid_write_leaves_its_memory_in_quarantine(case: Case) -> None:
    """Until the writer has answered; then all of it is back."""
    await case.hold_at("write 1")
    rank = case.cluster.named(case.rank("decode"))
    case.answer.cancel()
    await until(lambda: rank.pool.ledger().blocks.quarantined > 0)
    blocks = rank.pool.ledger().blocks
    await case.others_are_served()
    assert rank.pool.ledger().blocks == blocks
    case.gate.open()
    await case.gives_all_back()


async def test_two_ranks_that_cannot_reach_each_other_cost_neither_time_nor_a_second_prefill(
    case: Case,
) -> None:
    """Both are well, and the caller reaches both: only the path between them is broken.

    Prefill says so, and brings the same state elsewhere: nobody else could tell the caller.
    """
    case.cluster.gates.part("decode-0/0")
    steps = sum(rank.health().steps for rank in case.cluster.prefill)
    async with asyncio.timeout(ANSWER_S):
        for number in range(4):
            assert await case.cluster.answer(REQUEST) == case.expected, number
    assert sum(rank.health().steps for rank in case.cluster.prefill) == steps + 4 * 3
    await case.gives_all_back()
