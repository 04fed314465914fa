"""Suspicions on their way from whoever waits in vain to the head of the rank, and no further."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.generation import Caller
from cluster.guard import Guard
from cluster.messages import Endpoint
from cluster.routes import MOST_SUSPECTED, Routes
from tests.cluster.fakes import (
    CONFIG,
    Cluster,
    FakeRank,
    endpoint,
    identity,
    pool,
    read,
    request,
    until,
)
from tests.cluster.fakes import running as running_cluster


class Head:
    """Of some ranks; `well` says which of them answer."""

    def __init__(self, cluster: Cluster, *ranks: FakeRank) -> None:
        self.well = {rank.name: True for rank in ranks}
        self.answer = asyncio.Event()  # until then nobody is heard
        self.answer.set()
        self.asked: list[str] = []
        self.killed: list[tuple[str, str]] = []
        self.guard = Guard(
            {rank.endpoint.incarnation: rank.name for rank in ranks},
            answers=self._answers,
            kill=self._kill,
            find_router=cluster.find_router,
            identity=identity("head"),
            wire=CONFIG.wire,
        )

    async def _answers(self, name: str) -> bool:
        self.asked.append(name)
        await self.answer.wait()
        return self.well[name]

    async def _kill(self, name: str, why: str) -> None:
        self.killed.append((name, why))


@asynccontextmanager
async def guarding(cluster: Cluster, *heads: Head) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(head.guard.run()) for head in heads]
    await until(lambda: len(cluster.router._guards) == len(heads))
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def routes_of(caller: Caller) -> Routes:
    return caller._routes


async def known(caller: Caller) -> None:
    await until(lambda: routes_of(caller)._router is not None and caller.members())


async def test_a_suspicion_reaches_the_head_of_that_rank_alone_and_once_a_caller() -> None:
    cluster, ranks = pool(decodes=2)
    async with running_cluster(cluster, *ranks) as caller:
        _, first, second = ranks
        heads = Head(cluster, first), Head(cluster, second)
        await read(caller, request())
        async with guarding(cluster, *heads):
            await known(caller)
            for _ in range(3):
                routes_of(caller).suspect(first.endpoint, "it said nothing")
            await until(lambda: heads[0].asked)
            assert heads[0].asked == [first.name]
            assert heads[1].asked == []
            assert heads[0].killed == []  # it answered


async def test_a_rank_that_does_not_answer_its_head_either_is_killed_once() -> None:
    cluster, ranks = pool()
    async with running_cluster(cluster, *ranks) as caller:
        (_, decode) = ranks
        head = Head(cluster, decode)
        head.answer.clear()
        await read(caller, request())
        async with guarding(cluster, head):
            await known(caller)
            other = Caller(CONFIG, caller._peers._identity.secret, cluster.find_router)
            other.members()
            await until(lambda: routes_of(other)._router is not None)
            for one in (caller, other):
                routes_of(one).suspect(decode.endpoint, "silent for long")
            await until(lambda: head.killed)
            await other.close()
        assert head.asked == [decode.name]  # once, however many complain
        ((name, why),) = head.killed
        assert name == decode.name
        assert "silent for long" in why


async def test_the_router_itself_suspects_a_rank_whose_reports_end_without_a_word() -> None:
    cluster, ranks = pool()
    async with running_cluster(cluster, *ranks):
        (_, decode) = ranks
        head = Head(cluster, decode)
        head.well[decode.name] = False
        async with guarding(cluster, head):
            cluster.router._reports[decode.endpoint.incarnation]._connection.abort()
            await until(lambda: head.killed)


async def test_a_head_guards_again_when_the_router_has_restarted() -> None:
    cluster, ranks = pool()
    async with running_cluster(cluster, *ranks):
        (_, decode) = ranks
        head = Head(cluster, decode)
        async with guarding(cluster, head):
            await cluster.stop_router()
            await cluster.start_router()
            await until(lambda: cluster.router._guards, within_s=5.0)


async def test_a_suspicion_waits_for_a_head_that_has_not_found_the_router() -> None:
    cluster, ranks = pool()
    async with running_cluster(cluster, *ranks) as caller:
        (_, decode) = ranks
        head = Head(cluster, decode)
        await read(caller, request())
        await known(caller)
        routes_of(caller).suspect(decode.endpoint, "it said nothing")
        await until(lambda: cluster.router._untold)
        async with guarding(cluster, head):
            await until(lambda: head.asked)
        assert not cluster.router._untold


async def test_a_suspicion_without_a_router_goes_to_the_next_one() -> None:
    cluster, ranks = pool()
    async with running_cluster(cluster, *ranks) as caller:
        (_, decode) = ranks
        head = Head(cluster, decode)
        await read(caller, request())
        async with guarding(cluster, head):
            await known(caller)
            await cluster.stop_router()
            await until(lambda: routes_of(caller)._router is None)
            routes_of(caller).suspect(decode.endpoint, "it said nothing")
            await cluster.start_router()
            await until(lambda: head.asked, within_s=5.0)


def test_what_is_kept_of_suspicions_has_a_bound() -> None:
    cluster, _ = pool()
    routes = Routes(cluster.find_router, identity("caller"), CONFIG)
    for life in range(MOST_SUSPECTED + 5):
        routes.suspect(endpoint(incarnation=str(life)), "it said nothing")
    assert len(routes._suspected) == MOST_SUSPECTED
    assert str(MOST_SUSPECTED + 4) in routes._suspected


async def test_a_suspicion_against_somebody_unknown_harms_nobody() -> None:
    cluster, ranks = pool()
    async with running_cluster(cluster, *ranks) as caller:
        head = Head(cluster, *ranks)
        await read(caller, request())
        async with guarding(cluster, head):
            await known(caller)
            gone: Endpoint = ranks[1].endpoint.model_copy(update={"incarnation": "another life"})
            routes_of(caller).suspect(gone, "silent")
            assert await read(caller, request()) == await read(caller, request())
            assert head.asked == []
