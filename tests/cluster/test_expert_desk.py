"""The router's desk for experts, over real sockets: reports come in, placements go out."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from cluster.config import ClusterConfig, ExpertsSection
from cluster.errors import StartupError
from cluster.expert_messages import ExpertCounts, GroupBalance
from cluster.expert_placement import Placement, first_placement
from cluster.expert_status import ask_experts
from cluster.expert_tables import placement_of, table_of
from cluster.messages import ExpertReport, Failed
from cluster.placement_file import GroupPlacement, read, write
from cluster.router import Router
from cluster.wire import connect
from tests.cluster.expert_ranks import FakeGroup
from tests.cluster.fakes import CONFIG, SECRET, Cluster, identity
from tests.cluster.fakes import until as until_within
from tests.cluster.strictness import STRICT

pytestmark = STRICT

EXPERTS = ExpertsSection(
    report_s=0.02,
    window_steps=10,
    windows=3,
    most_moved_share=0.4,
    expert_bytes=1000,
    bytes_a_second=1e9,
)
UNEVEN = np.array([[90, 80, 70, 60, 1, 1, 1, 1]])  # the first rank does nearly everything


async def until(condition: Callable[[], object]) -> None:
    """Machines that run this may be very busy."""
    await until_within(condition, 30.0)


def config(**experts: object) -> ClusterConfig:
    patient = CONFIG.wire.model_copy(update={"t_detect_s": 30.0})  # nobody falls silent here
    section = EXPERTS.model_copy(update=experts)
    return CONFIG.model_copy(update={"wire": patient, "experts": section})


class Site:
    """A router, and groups that report to it."""

    def __init__(self, settings: ClusterConfig) -> None:
        self.settings = settings
        self.cluster = Cluster(settings)
        self.groups: list[FakeGroup] = []

    def add(self, name: str, **shape: int) -> FakeGroup:
        group = FakeGroup(name, self.cluster.find_router, self.settings, **shape)
        self.groups.append(group)
        group.start()
        return group

    async def known(self, group: FakeGroup) -> None:
        """Returns when the router knows all that the group is."""
        await until(lambda: self.told(group) is not None)

    def told(self, group: FakeGroup) -> GroupBalance | None:
        of_groups = self.cluster.router.experts.balance().groups
        return next((one for one in of_groups if one.group == group.name), None)

    def shown(self, group: FakeGroup) -> GroupBalance:
        told = self.told(group)
        assert told is not None
        return told

    async def given(self, group: FakeGroup) -> int:
        """The next version that every rank of the group is offered."""
        await until(lambda: (group.offered or -1) > group.version)
        assert group.offered is not None
        return group.offered

    async def arrived(self, group: FakeGroup) -> None:
        await until(lambda: self.shown(group).version == group.version)


@asynccontextmanager
async def site(settings: ClusterConfig | None = None) -> AsyncIterator[Site]:
    here = Site(settings or config())
    await here.cluster.start_router()
    try:
        yield here
    finally:
        for group in here.groups:
            await group.stop()
        if here.cluster.address is not None:
            await here.cluster.stop_router()


async def test_uneven_load_gets_a_group_another_placement_and_all_its_ranks_hear_of_it() -> None:
    async with site() as here:
        group = here.add("decode-0")
        await here.known(group)
        group.count(UNEVEN * 10, steps=10)
        assert await here.given(group) == 1
        first, second = (rank.slots.offered[-1] for rank in group.ranks)
        assert np.array_equal(first.placement.slots, second.placement.slots)
        assert first.placement.imbalance(UNEVEN)[0] < group.first.placement.imbalance(UNEVEN)[0]
        assert here.shown(group).given == 1

        group.switch()
        await here.arrived(group)
        shown = here.shown(group)
        assert shown.given is None
        assert np.array_equal(placement_of(shown.table).slots, first.placement.slots)
        outcomes = [one.outcome for one in shown.decisions]
        assert outcomes == ["given", "arrived"]
        given, arrived = shown.decisions
        assert sum(given.moved) > 0
        assert given.after[0] < given.before[0]
        assert arrived.stall_s == 0.002


async def test_one_rank_of_a_group_does_not_make_a_window() -> None:
    async with site() as here:
        group = here.add("decode-0")
        await here.known(group)
        group.ranks[0].slots.count(UNEVEN * 10, steps=10)
        await until(lambda: group.ranks[0].slots.steps == 0)  # it has reported
        assert here.shown(group).steps == 0
        group.ranks[1].slots.count(UNEVEN * 10, steps=10)
        await here.given(group)


async def test_steps_that_ranks_report_at_different_times_count_once() -> None:
    async with site(config(window_steps=1000)) as here:
        group = here.add("decode-0")
        await here.known(group)
        for rank in group.ranks:
            rank.slots.count(UNEVEN * 10, steps=10)
        await until(lambda: here.shown(group).steps == 10)


async def test_a_group_is_known_when_all_its_ranks_are() -> None:
    async with site() as here:
        group = FakeGroup("decode-0", here.cluster.find_router, here.settings)
        here.groups.append(group)
        group.ranks[0].start()
        balance = here.cluster.router.experts.balance
        await until(lambda: balance().waiting_for == ("decode-0",))
        assert balance().groups == ()
        group.ranks[1].start()
        await here.known(group)
        assert balance().waiting_for == ()


async def test_nothing_is_decided_while_a_live_group_has_not_reported() -> None:
    """Else a router that has just started might give a version a second time."""
    async with site() as here:
        quiet = FakeGroup("decode-1", here.cluster.find_router, here.settings, version=41)
        here.groups.append(quiet)
        quiet.ranks[0].start()
        await until(lambda: here.cluster.router.experts.balance().waiting_for == ("decode-1",))
        group = here.add("decode-0")
        await here.known(group)
        group.count(UNEVEN * 10, steps=10)
        await until(lambda: here.shown(group).windows == 1)
        assert here.shown(group).doing == "waiting for the first report of decode-1"
        assert group.offered is None
        quiet.ranks[1].start()
        assert await here.given(group) == 42


async def test_a_new_router_learns_everything_from_the_ranks() -> None:
    async with site() as here:
        group = here.add("decode-0", version=6)
        await here.known(group)
        await here.cluster.stop_router()
        await here.cluster.start_router()
        await here.known(group)
        assert here.shown(group).version == 6
        group.count(UNEVEN * 10, steps=10)
        assert await here.given(group) == 7


async def test_a_rank_that_comes_back_is_told_again() -> None:
    async with site() as here:
        group = here.add("decode-0")
        await here.known(group)
        group.count(UNEVEN * 10, steps=10)
        await here.given(group)
        rank = group.ranks[1]
        await rank.stop()
        rank.slots.offered.clear()
        rank.start()
        await until(lambda: rank.slots.offered)
        assert rank.slots.offered[0].version == 1


async def test_a_placement_that_no_rank_can_prepare_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with site(config(answer_timeout_s=0.1)) as here:
        group = here.add("decode-0")
        await here.known(group)
        for rank in group.ranks:
            rank.slots.refuse = "there is no memory for it"
        group.count(UNEVEN * 10, steps=10)
        await until(lambda: [one.outcome for one in here.shown(group).decisions][1:])
        assert here.shown(group).decisions[-1].outcome == "given_up"
        assert "there is no memory for it" in caplog.text
        assert here.shown(group).given is None


async def test_a_group_that_drains_gets_nothing_more() -> None:
    async with site() as here:
        group = here.add("decode-0")
        await here.known(group)
        for rank in group.ranks:
            rank.draining = True
            rank.loads.report_now()
        await until(lambda: here.told(group) is None)
        group.count(UNEVEN * 10, steps=10)
        await until(lambda: all(rank.slots.steps == 0 for rank in group.ranks))
        assert here.told(group) is None
        assert group.offered is None


async def test_a_new_group_begins_with_what_its_pool_has_learnt() -> None:
    async with site() as here:
        group = here.add("decode-0")
        await here.known(group)
        group.count(UNEVEN * 10, steps=10)
        await here.given(group)
        group.switch()
        await here.arrived(group)

        newcomer, prefill = here.add("decode-1"), here.add("prefill-0")
        await here.given(newcomer)
        learnt = newcomer.ranks[0].slots.offered[-1].placement
        assert np.array_equal(learnt.slots, group.ranks[0].slots.placed.placement.slots)
        await here.known(prefill)
        assert prefill.offered is None  # the other pool's load is another


async def test_a_static_placement_is_given_whatever_the_load_is(tmp_path: Path) -> None:
    path = tmp_path / "placements.json"
    slots = np.array([[[7, 6, 5, 4, 0], [3, 2, 1, 0, 7]]])
    write(path, [GroupPlacement("*", 1, Placement(slots, 8))])
    async with site(config(placement_file=str(path))) as here:
        group = here.add("decode-0")
        await here.given(group)
        assert np.array_equal(group.ranks[0].slots.offered[-1].placement.slots, slots)
        group.switch()
        await here.arrived(group)
        group.count(UNEVEN * 10, steps=10)
        await until(lambda: here.shown(group).windows == 1)
        assert here.shown(group).doing == "its placement is static"


async def test_a_static_file_that_cannot_be_read_is_an_error_at_the_start(tmp_path: Path) -> None:
    router = Router(config(placement_file=str(tmp_path / "none.json")), SECRET)
    with pytest.raises(StartupError, match=r"experts\.placement_file: .*none\.json"):
        await router.start()


async def test_placements_are_saved_and_begun_with_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    async with site(config(save_file=str(path))) as here:
        group = here.add("decode-abc")
        await here.known(group)
        group.count(UNEVEN * 10, steps=10)
        await here.given(group)
        group.switch()
        await until(path.exists)
        learnt = read(path)["decode-abc"].placement

    async with site(config(save_file=str(path))) as here:
        group = here.add("decode-xyz")
        await here.given(group)
        assert np.array_equal(group.ranks[0].slots.offered[-1].placement.slots, learnt.slots)


async def test_a_saved_file_that_is_spoilt_is_no_hindrance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "saved.json"
    path.write_text("{")
    async with site(config(save_file=str(path))) as here:
        await here.known(here.add("decode-0"))
    assert "groups begin without it" in caplog.text


async def test_balancing_can_be_switched_off_and_on_while_it_runs() -> None:
    async with site(config(disable_eplb=True)) as here:
        group = here.add("decode-0")
        await here.known(group)
        group.count(UNEVEN * 10, steps=10)
        await until(lambda: here.shown(group).windows == 1)
        assert here.shown(group).doing == "expert balancing is disabled"
        assert group.offered is None
        here.cluster.router.reconfigure(config())
        await here.given(group)


async def test_the_table_of_layers_is_logged_where_it_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="cluster.expert_desk"):
        async with site(config(show_detail=True)) as here:
            group = here.add("decode-0")
            await here.known(group)
            group.count(UNEVEN * 10, steps=10)
            await here.given(group)
    assert "version 1 given" in caplog.text
    assert "layer  before   after  moved" in caplog.text


async def test_whoever_asks_is_told_of_every_group() -> None:
    async with site() as here:
        group = here.add("decode-0")
        await here.known(group)
        assert here.cluster.address is not None
        me = identity("caller")
        answer = await ask_experts(here.cluster.address, me, here.settings.wire)
        assert [one.group for one in answer.groups] == ["decode-0"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"table": None}, "has not told its placement"),
        ({"index": 2}, "rank 2 of decode-0 is none of 2"),
        (
            {"counts": ExpertCounts(layers=1, experts=7, steps=1, tokens=bytes(28))},
            r"counts \(1, 7\) are not of 8 experts in 1 layers",
        ),
    ],
)
async def test_a_report_that_cannot_be_is_refused(changed: dict[str, object], reason: str) -> None:
    table = table_of(first_placement(1, 8, 2, 5))
    report = ExpertReport(group="decode-0", index=0, version=0, table=table)
    async with site() as here:
        assert here.cluster.address is not None
        connection = await connect(here.cluster.address, identity("decode"), here.settings.wire)
        async with await connection.open(report.model_copy(update=changed)) as stream:
            answer = await stream.receive()
        await connection.close()
        assert isinstance(answer, Failed)
        assert answer.error == "ProtocolError"
        assert re.search(reason, answer.message)


async def test_routes_are_answered_while_a_question_is_solved() -> None:
    """A group of the real model's size: the answer takes milliseconds of another thread."""
    async with site() as here:
        group = here.add("decode-0", layers=40, experts=384, ranks=8, slots=64)
        await here.known(group)
        draw = np.random.default_rng(0)
        group.count(draw.lognormal(3, 1, (40, 384)).astype(np.int64), steps=10)
        asked = asyncio.create_task(here.given(group))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        assert await asked == 1
        assert turns > 10
