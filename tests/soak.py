"""The soak: a small cluster of real processes under random load and random faults, for a while.

    python -m tests.soak --seconds 20 --seed 1

Two prefill and two decode ranks in processes of their own, with real NIXL and the real tiny
model; random prompts, greedy and seeded; callers that leave, are cut off, or find an answer's end
themselves; ranks that are paused, cut off from the CPU for longer than the detection time, or
killed and started anew. Decode's memory is promised more than once, so that answers are preempted;
short prompts are run by decode itself. Answers were computed before, by a plain loop over the
model. Ends with a table, and with exit code 1 if a token was wrong, a block was not given back, or
a request did not end.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from cluster.config import ClusterConfig
from cluster.errors import ClusterError
from cluster.generation import Caller, Timeline
from cluster.messages import Address, Request, Role
from cluster.router import Router
from tests.plain_loop import straight
from tests.rank_process import RankProcess
from tests.tiny import SECRET, make_prompt, make_request, tiny_config, until

CONFIG = tiny_config(
    transfer={"path": "packed", "transport": "nixl"},
    decode={
        "engine": {
            "num_blocks": 22,
            "num_slots": 8,
            "chunk_tokens": 32,
            "max_length": 512,
            "output_reserved": 0.0,
        }
    },
    router={"report_s": 0.1, "retry_after_s": 0.05, "local_prefill_tokens": 20},
    wire={"heartbeat_s": 0.2, "t_detect_s": 1.0, "connect_timeout_s": 2.0},
    generation={
        "max_attempts": 10,
        "reserve_timeout_s": 20.0,
        "recovery_wait_s": 30.0,
        "new_request_wait_s": 30.0,
        "step_timeout_s": 20.0,
    },
)
NAMES: tuple[tuple[Role, int], ...] = (("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1))
CLIENTS = 6
HUNG_S = 60.0  # far beyond what any chain of these faults can cost
LEDGER_S = 5.0  # from the last answer, or the last proven death, to all memory back
SETTLE_S = 30.0  # for a rank that was paused, or is just starting, to answer at all


@dataclass
class Tally:
    """What happened."""

    requests: int = 0
    tokens: int = 0
    finished: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    preempted: int = 0
    paths: Counter[str] = field(default_factory=Counter)  # of all attempts
    attempts_lost: int = 0
    places_lost: int = 0
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        return bool(self.wrong or self.leaked or self.hung)

    def table(self, seconds: float) -> str:
        times = sorted(self.recovery_s)
        p50 = f"{times[len(times) // 2]:.2f}" if times else "-"
        worst = f"{times[-1]:.2f}" if times else "-"
        faults = ", ".join(f"{kind} {number}" for kind, number in sorted(self.faults.items()))
        errors = ", ".join(f"{kind} {number}" for kind, number in sorted(self.errors.items()))
        rows = [
            ("seconds", f"{seconds:.0f}"),
            ("requests", f"{self.requests}, of these {self.finished} to their end"),
            ("tokens", str(self.tokens)),
            ("faults", f"{self.faults.total()}: {faults}"),
            ("paths", ", ".join(f"{path} {number}" for path, number in sorted(self.paths.items()))),
            ("preempted", str(self.preempted)),
            ("attempts lost", f"{self.attempts_lost}; places lost {self.places_lost}"),
            ("recovery", f"p50 {p50} s, max {worst} s, {len(times)} times"),
            ("errors", errors or "none"),
            ("wrong", str(len(self.wrong))),
            ("leaked", str(len(self.leaked))),
            ("hung", str(len(self.hung))),
        ]
        return "\n".join(f"{name:<14} {value}" for name, value in rows)


class Soak:
    def __init__(
        self, seed: int, answers: dict[Request, tuple[int, ...]], config: ClusterConfig
    ) -> None:
        self._config = config
        self.tally = Tally()
        self._random = random.Random(seed)
        self._answers = answers
        self._requests = list(answers)
        self._router = Router(config, SECRET)
        self._address: Address | None = None
        self._ranks: dict[str, RankProcess] = {}
        self._serial = 0
        self._timelines: dict[str, Timeline] = {}  # of requests that have not ended

    async def run(self, seconds: float) -> Tally:
        self._address = await self._router.start()
        self._caller = self._new_caller()
        try:
            for role, number in NAMES:
                self._start(role, number)
            await self._all_up()
            deadline = time.monotonic() + seconds
            jobs = [self._client(deadline) for _ in range(CLIENTS)]
            await asyncio.gather(self._mischief(deadline), *jobs)
            await self._check_ledgers()
        finally:
            await self._caller.close()
            for rank in self._ranks.values():
                rank.kill(signal.SIGCONT)
                rank.__exit__()
            await self._router.stop()
        return self.tally

    # ------------------------------------------------------------ load

    async def _client(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            request = self._random.choice(self._requests)
            self._serial += 1
            named = request.model_copy(update={"request_id": f"soak {self._serial}"})
            expected = self._answers[request]
            (how,) = self._random.choices(
                [self._whole, self._left, self._cut_off, self._stopped], [65, 15, 10, 10]
            )
            await self._bounded(named, how(named, expected))

    async def _bounded(self, request: Request, work: Coroutine[None, None, None]) -> None:
        self.tally.requests += 1
        try:
            async with asyncio.timeout(HUNG_S):
                await work
        except TimeoutError:  # its story tells whether it hung, or was only very unlucky
            story = self._timelines[request.request_id].summary()
            self.tally.hung.append(f"{request.request_id}\n{story}")
        except ClusterError as error:
            self.tally.errors[error.kind] += 1
            print(f"{request.request_id}: {error.kind}: {error}", file=sys.stderr)
        finally:
            self._timelines.pop(request.request_id, None)

    async def _read(
        self,
        caller: Caller,
        request: Request,
        expected: tuple[int, ...],
        stop_after: int,
        *,
        well: bool = False,
    ) -> None:
        """Tokens, each compared as it comes; leaves after `stop_after` of them, perhaps `well`."""
        timeline, seen, loss_at = Timeline(), list[int](), 0.0
        self._timelines[request.request_id] = timeline
        told = 0
        try:
            async with aclosing(caller.generate(request, timeline)) as deltas:
                async for delta in deltas:
                    if delta.first != len(seen):
                        self.tally.wrong.append(f"{request.request_id}: a gap or a double")
                    seen += delta.token_ids
                    if tuple(seen) != expected[: len(seen)]:
                        self.tally.wrong.append(
                            f"{request.request_id}: {seen} instead of {expected}\n"
                            + timeline.summary()
                        )
                        return
                    now = timeline.token_times[-1]
                    losses = [e.at_s for e in timeline.events if e.name in ("lost", "place_lost")]
                    if len(losses) > told:
                        loss_at = losses[told]
                        told = len(losses)
                        self.tally.recovery_s.append(now - loss_at)
                    if len(seen) >= stop_after:
                        if well:
                            await deltas.stop(stop_after)
                        return
                if len(seen) != len(expected):
                    self.tally.wrong.append(f"{request.request_id}: ended after {len(seen)}")
                self.tally.finished += 1
        finally:
            self.tally.tokens += len(seen)
            names = Counter(event.name for event in timeline.events)
            self.tally.paths.update(
                event.detail["path"] for event in timeline.events if event.name == "routed"
            )
            self.tally.preempted += names["preempted"]
            self.tally.attempts_lost += names["lost"]
            self.tally.places_lost += names["place_lost"]

    async def _whole(self, request: Request, expected: tuple[int, ...]) -> None:
        await self._read(self._caller, request, expected, len(expected) + 1)

    async def _stopped(self, request: Request, expected: tuple[int, ...]) -> None:
        """The client finds the end itself, as with a stop string."""
        self.tally.faults["client stops"] += 1
        index = self._random.randint(1, len(expected))
        await self._read(self._caller, request, expected, index, well=True)

    async def _left(self, request: Request, expected: tuple[int, ...]) -> None:
        """The client stops reading after some tokens, or in the middle of anything at all."""
        self.tally.faults["client leaves"] += 1
        if self._random.random() < 0.5:
            await self._read(self._caller, request, expected, self._random.randint(1, 4))
            return
        reading = asyncio.create_task(self._whole(request, expected))
        await asyncio.wait([reading], timeout=self._random.random() * 0.5)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    async def _cut_off(self, request: Request, expected: tuple[int, ...]) -> None:
        """The client's process is gone: its connections break, and nobody says goodbye."""
        self.tally.faults["caller cut off"] += 1
        caller = self._new_caller()
        reading = asyncio.create_task(self._read(caller, request, expected, len(expected) + 1))
        await asyncio.wait([reading], timeout=self._random.random() * 0.5)
        for connecting in caller._peers._connections.values():
            if connecting.done() and not connecting.cancelled() and not connecting.exception():
                connecting.result().abort()
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await caller.close()

    # ------------------------------------------------------------ faults

    async def _mischief(self, deadline: float) -> None:
        """One fault of a rank after another; there is always one of each role that is well."""
        while True:
            await asyncio.sleep(self._random.uniform(0.3, 1.2))
            if time.monotonic() > deadline:
                return
            role, number = self._random.choice(NAMES)
            await self._random.choices(
                [self._pause_briefly, self._pause_for_long, self._kill], [4, 2, 4]
            )[0](role, number)

    async def _pause_briefly(self, role: Role, number: int) -> None:
        await self._pause(role, number, "short pause", self._random.uniform(0.05, 0.6))

    async def _pause_for_long(self, role: Role, number: int) -> None:
        await self._pause(role, number, "long pause", self._random.uniform(1.5, 3.0))

    async def _pause(self, role: Role, number: int, what: str, seconds: float) -> None:
        self.tally.faults[f"{what} of {role}"] += 1
        rank = self._ranks[f"{role}-{number}"]
        rank.kill(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        rank.kill(signal.SIGCONT)

    async def _kill(self, role: Role, number: int) -> None:
        self.tally.faults[f"kill of {role}"] += 1
        rank = self._ranks[f"{role}-{number}"]
        if self._random.random() < 0.3:  # it hung before it died
            rank.kill(signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(0.1, 0.5))
        rank.kill()
        await asyncio.to_thread(rank.__exit__)
        self._start(role, number)
        await self._all_up()

    # ------------------------------------------------------------ ranks

    def _start(self, role: Role, number: int) -> None:
        assert self._address is not None
        self._ranks[f"{role}-{number}"] = RankProcess(role, number, self._config, self._address)

    async def _all_up(self) -> None:
        for rank in self._ranks.values():
            if not rank.started:
                await asyncio.to_thread(rank.ready)
        wanted = {rank.endpoint.incarnation for rank in self._ranks.values()}

        def known() -> bool:
            return wanted <= {one.endpoint.incarnation for one in self._router.members()}

        await until(known, SETTLE_S)

    def _new_caller(self) -> Caller:
        async def find_router() -> Address | None:
            return self._address

        return Caller(self._config, SECRET, find_router)

    async def _check_ledgers(self) -> None:
        """Nobody asks for anything any more, so nothing may be held anywhere."""
        await self._all_up()
        for name, rank in self._ranks.items():
            await self._settled(name, rank.held)

    async def _settled(self, name: str, held: Callable[[], str]) -> None:
        deadline = time.monotonic() + LEDGER_S
        while what := await asyncio.to_thread(held):
            if time.monotonic() > deadline:
                self.tally.leaked.append(f"{name}: {what}")
                return
            await asyncio.sleep(0.05)


def prepared(seed: int, number: int) -> dict[Request, tuple[int, ...]]:
    """Random requests and, from a plain loop, their answers."""
    dice = random.Random(seed)
    requests = []
    for serial in range(number):
        length = dice.choice((1, 15, 16, 17, dice.randint(1, 40), dice.randint(1, 250)))
        seeded: dict[str, Any] = {"temperature": 1.3, "seed": serial} if dice.random() < 0.5 else {}
        requests.append(
            make_request(
                make_prompt(length, serial),
                f"r{serial}",
                max_tokens=dice.choice((1, dice.randint(1, 24), dice.randint(40, 80))),
                **seeded,
            )
        )
    return {request: straight(request) for request in requests}


async def soak(seconds: float, seed: int, requests: int, path: str = "packed") -> Tally:
    started = time.monotonic()
    answers = prepared(seed, requests)
    print(f"{requests} answers computed in {time.monotonic() - started:.1f} s", file=sys.stderr)
    config = CONFIG.model_copy(
        update={"transfer": CONFIG.transfer.model_copy(update={"path": path})}
    )
    return await Soak(seed, answers, config).run(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description="A cluster under random load and faults.")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=24, help="different ones")
    parser.add_argument("--path", choices=("packed", "direct", "auto"), default="packed")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING if arguments.verbose else logging.ERROR)
    tally = asyncio.run(soak(arguments.seconds, arguments.seed, arguments.requests, arguments.path))
    print(tally.table(arguments.seconds))
    for problem in tally.wrong + tally.leaked + tally.hung:
        print(problem)
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
