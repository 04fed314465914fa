"""Ranks and a router made of real sockets and fake work, all in one process.

A fake answer is a count: its token of index i is FIRST_TOKEN + i, whatever the prompt. A test makes
a rank misbehave by setting an attribute, or by replacing one of its small methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count

from cluster.config import ClusterConfig, parse_config
from cluster.generation import Caller, Timeline
from cluster.messages import (
    Address,
    DrainingNow,
    Endpoint,
    FinishReason,
    Generate,
    HandedOver,
    Hello,
    Load,
    Member,
    NoRoomNow,
    Prefill,
    PushTo,
    Request,
    Reserve,
    Reserved,
    Role,
    Sampling,
    Segment,
    Started,
    Tokens,
    WireMessage,
    pack_ids,
    unpack_ids,
)
from cluster.reporter import Reporter
from cluster.router import Router
from cluster.wire import Identity, Server, Stream, new_incarnation, serve

Places = asyncio.Queue[PushTo]
"""Where a caller wants a prompt's state."""

SECRET = b"s" * 32
FIRST_TOKEN = 100
AT_ONCE_S = 0.4  # on a busy machine, and less than any timer here that could have done it instead
SERIALS = count(1)  # of reservations

CONFIG: ClusterConfig = parse_config(
    {
        "wire": {"heartbeat_s": 0.05, "t_detect_s": 0.5, "connect_timeout_s": 2.0},
        "router": {"report_s": 0.05, "retry_after_s": 0.05},
        "generation": {
            "reserve_timeout_s": 1.0,
            "recovery_wait_s": 1.0,
            "step_timeout_s": 5.0,
        },
    }
)

LOAD = Load(free_blocks=64, total_blocks=64, free_slots=8, max_length=1024, block_tokens=16)


def identity(role: str) -> Identity:
    return Identity(role, new_incarnation(), SECRET)


def endpoint(name: str = "decode-0/0", role: Role = "decode", incarnation: str = "1") -> Endpoint:
    return Endpoint(
        name=name,
        role=role,
        incarnation=incarnation,
        address=Address(host="127.0.0.1", port=1),
    )


def request(max_tokens: int = 6, prompt: tuple[int, ...] = (1, 2, 3), name: str = "r1") -> Request:
    return Request(
        request_id=name, prompt=pack_ids(prompt), sampling=Sampling(max_tokens=max_tokens)
    )


def answer(max_tokens: int = 6) -> list[int]:
    """What every fake rank says to request(max_tokens)."""
    return [FIRST_TOKEN + index for index in range(max_tokens)]


def tokens_at(index: int, wanted: Request) -> Tokens:
    finish: FinishReason | None = "length" if index + 1 == wanted.sampling.max_tokens else None
    return Tokens(first=index, token_ids=(FIRST_TOKEN + index,), finish=finish)


class Cluster:
    """One router and its fake ranks; `pushed` stands for the transfer between them."""

    router: Router

    def __init__(self, config: ClusterConfig = CONFIG) -> None:
        self.config = config
        self.address: Address | None = None  # while there is a router
        self.pushed: dict[str, asyncio.Event] = {}  # by reservation
        self.ranks: list[FakeRank] = []

    async def find_router(self) -> Address | None:
        return self.address

    async def start_router(self) -> Address:
        self.router = Router(self.config, SECRET)
        self.address = await self.router.start()
        return self.address

    async def stop_router(self) -> None:
        self.address = None
        await self.router.stop()

    async def add(self, rank: FakeRank) -> FakeRank:
        """Returns when the router knows it."""
        await rank.start()
        self.ranks.append(rank)
        await until(lambda: rank.endpoint in [one.endpoint for one in self.router.members()])
        return rank


async def until(condition: Callable[[], object], within_s: float = 2.0) -> None:
    """Lets the loop turn until the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


class FakeRank:
    role: Role

    def __init__(self, cluster: Cluster, name: str, load: Load = LOAD) -> None:
        self.cluster = cluster
        self.name = name
        self.load = load
        self.draining = False
        self.heard: list[WireMessage] = []  # first messages of streams
        self.open_streams = 0
        self.dying: asyncio.Task[None] | None = None
        self.before_token: Callable[[int], Awaitable[None]] = _nothing

    async def start(self) -> None:
        me = identity(self.role)
        self.server: Server = await serve(self._serve, me, self.cluster.config.wire)
        self.endpoint = Endpoint(
            name=self.name,
            role=self.role,
            incarnation=me.incarnation,
            address=self.server.address,
        )
        self.reporter = Reporter(self.cluster.find_router, me, self.cluster.config, self.member)
        self._reporting = asyncio.create_task(self.reporter.run())

    def member(self) -> Member:
        return Member(endpoint=self.endpoint, load=self.load, draining=self.draining)

    async def stop(self) -> None:
        self._reporting.cancel()
        await asyncio.gather(self._reporting, return_exceptions=True)
        await self.server.close()

    async def die(self) -> None:
        """To be awaited inside a handler: closes every connection, and never returns."""
        self.dying = asyncio.create_task(self.stop())
        await asyncio.Event().wait()

    async def restart(self) -> None:
        """Another process of the same name."""
        if self.dying:
            await self.dying
            self.dying = None
        await self.start()

    async def _serve(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        """Does its work until that is done or the caller has left."""
        self.heard.append(first)
        self.open_streams += 1
        places: Places = asyncio.Queue()
        work = asyncio.create_task(self.serve(stream, first, places))
        listening = asyncio.create_task(_listen(stream, places))
        try:
            await asyncio.wait((work, listening), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            listening.cancel()
            await asyncio.gather(work, listening, return_exceptions=True)
            self.open_streams -= 1

    async def serve(self, stream: Stream, first: WireMessage, places: Places) -> None:
        raise NotImplementedError

    async def send_tokens(self, stream: Stream, wanted: Request, start: int) -> None:
        for index in range(start, wanted.sampling.max_tokens):
            await self.before_token(index)
            await stream.send(tokens_at(index, wanted))


class FakePrefill(FakeRank):
    role: Role = "prefill"

    async def serve(self, stream: Stream, first: WireMessage, places: Places) -> None:
        assert isinstance(first, Prefill)
        index = first.request.output_length
        await stream.send(Started(queued_s=0.0))
        await self.before_token(index)
        token = self.first_token(index, first.request)
        await stream.send(token)
        while token.finish is None:
            if await self.push(stream, await places.get()):
                return

    def first_token(self, index: int, wanted: Request) -> Tokens:
        return tokens_at(index, wanted)

    async def push(self, stream: Stream, place: PushTo) -> bool:
        """True when it is accepted; False when another place is needed."""
        self.cluster.pushed[place.reservation].set()
        await stream.send(handed_over(place.reservation))
        return True


class FakeDecode(FakeRank):
    role: Role = "decode"
    full = False
    leaving = False  # it says so to callers; the router does not know it yet

    async def serve(self, stream: Stream, first: WireMessage, places: Places) -> None:
        assert isinstance(first, Reserve | Generate)
        if isinstance(first, Generate):
            await stream.send(Started(queued_s=0.0))
            await self.send_tokens(stream, first.request, first.request.output_length)
            return
        if self.full:
            await stream.send(NoRoomNow(retry_after_s=0.02))
            return
        if self.leaving:
            await stream.send(DrainingNow())
            return
        await self.reserve(stream, first.request)

    async def reserve(self, stream: Stream, wanted: Request) -> None:
        serial = f"{self.endpoint.incarnation}:{next(SERIALS)}"
        pushed = self.cluster.pushed[serial] = asyncio.Event()
        await stream.send(
            Reserved(reservation=serial, segment=Segment(offset=0, cell_bytes=1024, cells=2))
        )
        await self.wait_for_state(pushed)
        await self.send_tokens(stream, wanted, wanted.output_length + 1)

    async def wait_for_state(self, pushed: asyncio.Event) -> None:
        await pushed.wait()


def handed_over(reservation: str) -> HandedOver:
    return HandedOver(
        bytes_moved=4096,
        pushes=2,
        push_s=0.001,
        tail_s=0.0005,
        path="memory",
        reservation=reservation,
    )


async def _nothing(index: int) -> None:
    return None


async def _listen(stream: Stream, places: Places) -> None:
    async for message in stream:
        assert isinstance(message, PushTo)
        places.put_nowait(message)


@asynccontextmanager
async def running(
    cluster: Cluster, *ranks: FakeRank, config: ClusterConfig | None = None
) -> AsyncIterator[Caller]:
    """A caller of a cluster with a router and these ranks; all of it ends with the block."""
    await cluster.start_router()
    for rank in ranks:
        await cluster.add(rank)
    caller = Caller(config or cluster.config, SECRET, cluster.find_router)
    try:
        yield caller
    finally:
        await caller.close()
        for rank in cluster.ranks:
            await (rank.dying or rank.stop())
        if cluster.address is not None:
            await cluster.stop_router()


async def read(
    caller: Caller,
    wanted: Request,
    timeline: Timeline | None = None,
    got: list[int] | None = None,
) -> tuple[list[int], str | None]:
    """The whole answer, and how it ended; asserts that indices go up by one.

    Tokens are appended to `got`, so that they are seen also when an error ends it.
    """
    got = [] if got is None else got
    finish: str | None = None
    async for delta in caller.generate(wanted, timeline):
        assert finish is None, "something came after the end"
        assert delta.first == wanted.output_length + len(got)
        got += delta.token_ids
        finish = delta.finish
    return got, finish


def with_generation(**settings: object) -> ClusterConfig:
    generation = CONFIG.generation.model_copy(update=settings)
    return CONFIG.model_copy(update={"generation": generation})


def pool(prefills: int = 1, decodes: int = 1) -> tuple[Cluster, list[FakeRank]]:
    cluster = Cluster()
    ranks: list[FakeRank] = [FakePrefill(cluster, f"prefill-{n}/0") for n in range(prefills)]
    ranks += [FakeDecode(cluster, f"decode-{n}/0") for n in range(decodes)]
    return cluster, ranks


def once(act: Callable[[], Awaitable[object]], at_index: int) -> Callable[[int], Awaitable[None]]:
    """`act` before the token of that index, the first time only."""
    done = False

    async def before_token(index: int) -> None:
        nonlocal done
        if index == at_index and not done:
            done = True
            await act()

    return before_token


def attempts(*ranks: FakeRank) -> list[tuple[str, int, list[int]]]:
    """(kind, attempt, output so far) of what each of the ranks was asked, in order."""
    return [
        (first.kind, first.attempt, unpack_ids(first.request.output))
        for rank in ranks
        for first in rank.heard
        if isinstance(first, Prefill | Reserve | Generate)
    ]


def names(timeline: Timeline) -> list[str]:
    return [event.name for event in timeline.events]
