"""What a routing decision costs: `python -m cluster.bench_route [prefills] [decodes]`.

The policy and the charge for it, as the router does them for each request, on seeded loads; and
then whole questions to a router over its socket. Everything on one core, in processor time, so
that a busy machine does not count.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass

from cluster.config import ClusterConfig, RouterSection
from cluster.membership import Roster
from cluster.messages import Address, Endpoint, Load, Member, Report, Role, Route, Routed
from cluster.policy import decide
from cluster.router import Router
from cluster.wire import Identity, connect, new_incarnation

SECRET = bytes(32)


@dataclass(frozen=True)
class RouteCost:
    p50_us: float
    p99_us: float
    routes_a_second: float


def members(prefills: int, decodes: int, seed: int = 0) -> list[Member]:
    """Ranks of one domain with random loads."""
    draw = random.Random(seed)
    prefill: list[Role] = ["prefill"] * prefills
    decode: list[Role] = ["decode"] * decodes
    return [
        Member(
            endpoint=Endpoint(
                name=f"{role}-{number}/0",
                role=role,
                incarnation=f"{number:016x}",
                address=Address(host="127.0.0.1", port=1 + number),
            ),
            load=Load(
                waiting=draw.randrange(4),
                running=draw.randrange(64),
                waiting_tokens=draw.randrange(100_000),
                free_blocks=draw.randrange(2000),
                total_blocks=4000,
                free_slots=draw.randrange(64),
                max_length=1 << 20,
                block_tokens=128,
            ),
        )
        for number, role in enumerate(prefill + decode)
    ]


def routes(count: int, seed: int = 1) -> list[Route]:
    draw = random.Random(seed)
    lengths = [draw.randrange(1, 100_000) for _ in range(count)]
    return [
        Route(request_id=f"r{number}", length=length, longest=length + 1000)
        for number, length in enumerate(lengths)
    ]


def measure(ranks: list[Member], questions: list[Route]) -> RouteCost:
    """The decision alone, in processor time; all ranks report again after each hundred."""
    settings = RouterSection()
    seconds: list[float] = []
    for start in range(0, len(questions), 100):
        roster = Roster.of(ranks, now=0.0)
        for question in questions[start : start + 100]:
            begun = time.thread_time()
            answer, roster = decide(roster, question, settings)
            seconds.append(time.thread_time() - begun)
            assert isinstance(answer, Routed)
    seconds.sort()
    return RouteCost(
        p50_us=seconds[len(seconds) // 2] * 1e6,
        p99_us=seconds[len(seconds) * 99 // 100] * 1e6,
        routes_a_second=len(seconds) / sum(seconds),
    )


async def ask(ranks: list[Member], questions: list[Route]) -> float:
    """Questions a second of processor time over the socket, 64 at once, both ends here."""
    config = ClusterConfig()
    router = Router(config, SECRET)
    address = await router.start()
    connection = await connect(address, Identity("caller", new_incarnation(), SECRET), config.wire)
    for rank in ranks:
        await connection.open(Report(member=rank))
    todo = iter(questions)

    async def caller() -> None:
        for question in todo:
            async with await connection.open(question) as stream:
                await stream.receive()

    begun = time.process_time()
    await asyncio.gather(*(caller() for _ in range(64)))
    seconds = time.process_time() - begun
    await connection.close()
    await router.stop()
    return len(questions) / seconds


def main() -> None:
    prefills, decodes = (int(text) for text in (sys.argv[1:] or ["4", "64"]))
    ranks = members(prefills, decodes)
    cost = measure(ranks, routes(20_000))
    print(
        f"route {prefills}P+{decodes}D: p50 {cost.p50_us:.1f} us, p99 {cost.p99_us:.1f} us, "
        f"{cost.routes_a_second:,.0f} routes/s a core (decision only)"
    )
    rate = asyncio.run(ask(ranks, routes(5_000)))
    print(f"over the socket, both ends on one core: {rate:,.0f} routes/s")


if __name__ == "__main__":
    main()
