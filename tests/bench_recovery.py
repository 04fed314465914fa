"""How long faults are felt: one table of measured times against their promises.

    python -m tests.bench_recovery --rounds 10

One prefill and two decode ranks in processes of their own, real NIXL, the real tiny model, no Ray.
Each round starts from an idle cluster. Times include one poll of a rank, a few milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

from cluster.generation import Caller, Timeline
from cluster.messages import Address, Request, Role
from cluster.router import Router
from tests.rank_process import RankProcess
from tests.tiny import SECRET, make_prompt, make_request, tiny_config, until

T_DETECT_S = 1.0
CONFIG = tiny_config(
    transfer={"transport": "nixl"},
    wire={"heartbeat_s": 0.2, "t_detect_s": T_DETECT_S},
    generation={"recovery_wait_s": 30.0, "max_attempts": 5},
)
LONG = make_request(make_prompt(400), "long", max_tokens=80)
SHORT = make_request(make_prompt(20), "short", max_tokens=80)

PROMISES = {
    "cancelled in mid-prefill -> nothing runs, all memory is back": 2.0,
    "cancelled in mid-answer -> nothing runs, all memory is back": 2.0,
    "decode killed -> its caller knows": 1.0,
    "decode stopped -> its caller knows": T_DETECT_S + 1.0,
    "prefill killed in mid-push -> decode's ledger is back": 5.0,
    "the only decode killed -> its next life is known": 10.0,
    "the only decode killed -> the answer's next token": 10.0,
}
"""Seconds."""


@dataclass
class Bench:
    """A small cluster, and what was measured on it."""

    router: Router
    address: Address
    caller: Caller
    ranks: dict[str, RankProcess]
    times: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in PROMISES})

    def start(self, role: Role, number: int) -> None:
        self.ranks[f"{role}-{number}/0"] = RankProcess(role, number, CONFIG, self.address)

    async def all_up(self) -> None:
        for rank in self.ranks.values():
            await asyncio.to_thread(rank.ready)
        wanted = {rank.endpoint.incarnation for rank in self.ranks.values()}
        await until(
            lambda: wanted == {one.endpoint.incarnation for one in self.router.members()}, 30.0
        )

    def end(self) -> None:
        for rank in self.ranks.values():
            rank.__exit__()

    async def restart(self, name: str) -> None:
        role, _, number = name.removesuffix("/0").partition("-")
        await asyncio.to_thread(self.ranks[name].__exit__)
        self.start("prefill" if role == "prefill" else "decode", int(number))
        await self.all_up()

    async def idle(self, *names: str) -> None:
        for name in names or tuple(self.ranks):
            while await asyncio.to_thread(self.ranks[name].held):
                await asyncio.sleep(0.005)

    def note(self, what: str, since: float) -> None:
        self.times[what].append(time.monotonic() - since)

    def table(self) -> str:
        rows = [f"{'from -> to':<62} {'promise':>8} {'p50':>8} {'max':>8}"]
        for what, limit_s in PROMISES.items():
            times = sorted(self.times[what])
            p50, worst = times[len(times) // 2], times[-1]
            rows.append(f"{what:<62} {limit_s:>6.1f} s {p50:>6.2f} s {worst:>6.2f} s")
        return "\n".join(rows)

    # ------------------------------------------------------------ what is measured

    async def cancel_prefill(self) -> None:
        timeline = Timeline()
        reading = asyncio.create_task(self._read(LONG, timeline, 10**6))
        await until(lambda: timeline.last("started") is not None)
        reading.cancel()
        left = time.monotonic()
        with suppress(asyncio.CancelledError):
            await reading
        await self.idle()
        self.note("cancelled in mid-prefill -> nothing runs, all memory is back", left)

    async def cancel_answer(self) -> None:
        await self._read(SHORT, Timeline(), 6)
        left = time.monotonic()
        await self.idle()
        self.note("cancelled in mid-answer -> nothing runs, all memory is back", left)

    async def lose_decode(self, how: signal.Signals) -> None:
        """And go on elsewhere; the lost one comes back afterwards."""
        timeline = Timeline()
        reading = asyncio.create_task(self._read(SHORT, timeline, 10**6))
        await until(lambda: timeline.last("taken_over") is not None)
        taken = timeline.last("taken_over")
        assert taken is not None
        name = str(taken.detail["decode"])
        self.ranks[name].kill(how)
        struck = time.monotonic()
        await until(lambda: timeline.last("lost") is not None)
        verb = "killed" if how is signal.SIGKILL else "stopped"
        self.note(f"decode {verb} -> its caller knows", struck)
        await reading
        await self.restart(name)

    async def kill_prefill(self) -> None:
        timeline = Timeline()
        reading = asyncio.create_task(self._read(LONG, timeline, 10**6))
        await until(lambda: timeline.last("reserved") is not None)
        self.ranks["prefill-0/0"].kill()
        struck = time.monotonic()
        await self.idle("decode-0/0", "decode-1/0")
        self.note("prefill killed in mid-push -> decode's ledger is back", struck)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await self.restart("prefill-0/0")

    async def lose_the_only_decode(self) -> None:
        """Another one takes its place as soon as a supervisor could have noticed: at once."""
        spare = self.ranks.pop("decode-1/0")
        await asyncio.to_thread(spare.__exit__)
        await self.all_up()
        struck, seen = 0.0, 0
        restarting: asyncio.Task[None] | None = None
        async with aclosing(self.caller.generate(SHORT)) as deltas:
            async for delta in deltas:
                seen += len(delta.token_ids)
                if restarting is not None:
                    self.note("the only decode killed -> the answer's next token", struck)
                    break
                if seen >= 4:
                    self.ranks["decode-0/0"].kill()
                    struck = time.monotonic()
                    restarting = asyncio.create_task(self._noted_restart(struck))
        assert restarting is not None
        await restarting
        self.start("decode", 1)
        await self.all_up()

    async def _noted_restart(self, struck: float) -> None:
        await self.restart("decode-0/0")
        self.note("the only decode killed -> its next life is known", struck)

    async def _read(self, request: Request, timeline: Timeline, tokens: int) -> None:
        seen = 0
        async with aclosing(self.caller.generate(request, timeline)) as deltas:
            async for delta in deltas:
                seen += len(delta.token_ids)
                if seen >= tokens:
                    return

    @property
    def rounds(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        return (
            self.cancel_prefill,
            self.cancel_answer,
            lambda: self.lose_decode(signal.SIGKILL),
            lambda: self.lose_decode(signal.SIGSTOP),
            self.kill_prefill,
            self.lose_the_only_decode,
        )


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """A cluster of its own."""
    async with AsyncExitStack() as life:
        router = Router(CONFIG, SECRET)
        address = await router.start()
        life.push_async_callback(router.stop)

        async def find_router() -> Address | None:
            return address

        caller = Caller(CONFIG, SECRET, find_router)
        life.push_async_callback(caller.close)
        one = Bench(router, address, caller, {})
        life.callback(one.end)
        one.start("prefill", 0)
        one.start("decode", 0)
        one.start("decode", 1)
        await one.all_up()
        await one._read(SHORT, Timeline(), 10**6)
        yield one


async def measure(rounds: int) -> Bench:
    async with bench() as one:
        for _ in range(rounds):
            for work in one.rounds:
                await one.idle()
                await work()
        return one


def main() -> None:
    parser = argparse.ArgumentParser(description="How long faults are felt.")
    parser.add_argument("--rounds", type=int, default=10)
    print(asyncio.run(measure(parser.parse_args().rounds)).table())


if __name__ == "__main__":
    main()
