"""The router and those who report to it, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import Unauthorized
from cluster.messages import (
    Failed,
    Membership,
    NoWorkers,
    Prefill,
    Report,
    Route,
    Routed,
    Watch,
    WireMessage,
)
from cluster.router import Router
from cluster.wire import Identity, connect
from tests.cluster.fakes import (
    AT_ONCE_S,
    CONFIG,
    SECRET,
    Cluster,
    FakeDecode,
    FakePrefill,
    identity,
    request,
    running,
    until,
)
from tests.cluster.strictness import STRICT

pytestmark = STRICT

ROUTE = Route(request_id="r", length=10, longest=20)


async def ask(cluster: Cluster, question: WireMessage) -> WireMessage | None:
    assert cluster.address is not None
    connection = await connect(cluster.address, identity("caller"), CONFIG.wire)
    async with await connection.open(question) as stream:
        answer = await stream.receive()
    await connection.close()
    return answer


async def test_a_route_names_one_rank_of_each_pool() -> None:
    cluster = Cluster()
    prefill, decode = FakePrefill(cluster, "p"), FakeDecode(cluster, "d")
    async with running(cluster, prefill, decode):
        routed = await ask(cluster, ROUTE)
        assert routed == Routed(prefill=prefill.endpoint, decode=decode.endpoint)


async def test_a_rank_that_dies_is_out_at_once() -> None:
    cluster = Cluster()
    prefill, decode = FakePrefill(cluster, "p"), FakeDecode(cluster, "d")
    async with running(cluster, prefill, decode):
        await decode.stop()
        await until(lambda: len(cluster.router.members()) == 1, AT_ONCE_S)
        answer = await ask(cluster, ROUTE)
        assert isinstance(answer, NoWorkers)
        assert answer.message == "no decode worker is up"


async def test_a_rank_that_drains_gets_no_new_work_at_once() -> None:
    cluster = Cluster(
        CONFIG.model_copy(update={"router": CONFIG.router.model_copy(update={"report_s": 100.0})})
    )
    prefill, decode = FakePrefill(cluster, "p"), FakeDecode(cluster, "d")
    async with running(cluster, prefill, decode):
        decode.draining = True
        decode.reporter.report_now()
        await until(lambda: any(one.draining for one in cluster.router.members()), AT_ONCE_S)
        assert isinstance(await ask(cluster, ROUTE), NoWorkers)


async def test_a_rank_that_stops_reporting_is_out_after_the_detection_time() -> None:
    """Its connection lives on, as when only the reporting hangs."""
    cluster = Cluster()
    async with running(cluster) as caller:
        assert cluster.address is not None
        rank = FakeDecode(cluster, "d")
        await cluster.add(rank)
        rank._reporting.cancel()
        await until(lambda: not cluster.router.members())
        connection = await connect(cluster.address, identity("decode"), CONFIG.wire)
        async with await connection.open(Report(member=rank.member())):
            await until(lambda: cluster.router.members())
            since = asyncio.get_running_loop().time()
            await until(lambda: not cluster.router.members())
            assert asyncio.get_running_loop().time() - since > CONFIG.wire.t_detect_s * 0.9
        await connection.close()
        assert caller.members() == ()


async def test_an_old_connection_of_a_rank_that_ends_late_does_not_remove_it() -> None:
    cluster = Cluster()
    rank = FakeDecode(cluster, "d")
    async with running(cluster, rank):
        assert cluster.address is not None
        rank._reporting.cancel()
        await until(lambda: not cluster.router.members())
        first = await connect(cluster.address, identity("decode"), CONFIG.wire)
        second = await connect(cluster.address, identity("decode"), CONFIG.wire)
        await first.open(Report(member=rank.member()))
        await until(lambda: cluster.router.members())
        stream = await second.open(Report(member=rank.member()))
        await until(lambda: len(cluster.router._server._tasks) == 2)
        await asyncio.sleep(0)
        await first.close()
        await until(lambda: len(cluster.router._server._tasks) == 1)
        assert len(cluster.router.members()) == 1
        await stream.close()
        await until(lambda: not cluster.router.members())
        await second.close()


async def test_a_restarted_router_knows_everybody_again() -> None:
    cluster = Cluster()
    ranks = [FakePrefill(cluster, "p"), FakeDecode(cluster, "d0"), FakeDecode(cluster, "d1")]
    async with running(cluster, *ranks):
        await cluster.stop_router()
        await cluster.start_router()
        await until(lambda: len(cluster.router.members()) == 3)


async def test_everybody_moves_to_a_new_leader_while_the_old_one_still_listens() -> None:
    cluster = Cluster()
    rank = FakeDecode(cluster, "d")
    async with running(cluster, rank) as caller:
        await until(caller.members)
        old = cluster.router
        await cluster.start_router()
        await until(lambda: cluster.router.members() and not old.members(), 4.0)
        await until(lambda: caller._routes._router and not old._server._connections, 4.0)
        await old.stop()
        await until(lambda: len(caller.members()) == 1)


async def test_watchers_hear_of_every_change_at_once() -> None:
    cluster = Cluster(
        CONFIG.model_copy(update={"router": CONFIG.router.model_copy(update={"report_s": 100.0})})
    )
    rank = FakeDecode(cluster, "d")
    async with running(cluster):
        assert cluster.address is not None
        connection = await connect(cluster.address, identity("caller"), CONFIG.wire)
        async with await connection.open(Watch()) as stream, asyncio.timeout(2.0):
            assert await stream.receive() == Membership(members=())
            await cluster.add(rank)
            assert await stream.receive() == Membership(members=(rank.member(),))
            rank.draining = True
            rank.reporter.report_now()
            assert await stream.receive() == Membership(members=(rank.member(),))
            await rank.stop()
            assert await stream.receive() == Membership(members=())
        await connection.close()


async def test_watchers_see_loads_too() -> None:
    cluster = Cluster()
    rank = FakeDecode(cluster, "d")
    async with running(cluster, rank) as caller:
        await until(lambda: caller.members())
        rank.load = rank.load.model_copy(update={"running": 7})
        await until(lambda: caller.members()[0].load.running == 7)


async def test_a_stranger_learns_nothing() -> None:
    cluster = Cluster()
    address = await cluster.start_router()
    with pytest.raises(Unauthorized):
        await connect(address, Identity("caller", "i", b"other"), CONFIG.wire)
    await cluster.stop_router()


async def test_a_question_that_is_not_for_the_router_is_refused() -> None:
    cluster = Cluster()
    async with running(cluster):
        answer = await ask(cluster, Prefill(request=request(), attempt=1))
        assert isinstance(answer, Failed)
        assert answer.error == "ProtocolError"
    assert Router(CONFIG, SECRET).incarnation < Router(CONFIG, SECRET).incarnation
