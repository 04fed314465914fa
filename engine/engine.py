"""The step loop as asyncio sees it: a run is entered, watched and left. Knows no sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from cluster.errors import Preempted as PreemptedError
from cluster.errors import WorkerLost
from cluster.health import Health
from cluster.messages import PromptLogprobs, Request, TokenLogprobs
from engine.choice import Choice
from engine.request import Broken, End, Preempted, Removed, Running, Settle, settled, stop_ids
from engine.schedule import Schedule
from engine.step_loop import Execute, News, Pace, StepLoop
from kv_transfer.blocks import Lease

logger = logging.getLogger(__name__)

MOST_SCORED = 1024  # log-probabilities of a prompt in one message
STOP_TIMEOUT_S = 10.0  # for the step in progress; the thread dies with the process anyway


class Run:
    """One request's way through the engine, as far as it has been told; grows until `end`."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._changed = asyncio.Event()
        self.started = False
        self.done = running.done  # positions whose state is final in the blocks
        self._ahead: dict[int, tuple[int, Any]] = {}  # by layer, of its per-token rows alone
        self.choices: list[Choice] = []
        self._scored: list[TokenLogprobs] = []  # of the prompt, not yet told
        self._scored_to = running.request.scored.start  # positions below it need no scoring
        self.end: End | None = None
        self.ended_at = 0.0

    @property
    def remaining(self) -> int:
        """Positions that are still to be computed before its next token."""
        known = self._running.request.prompt_length + self._running.request.output_length
        return max(0, known - self.done)

    @property
    def new_ids(self) -> list[int]:
        return [choice.token for choice in self.choices]

    async def until(self, reached: Callable[[], bool]) -> None:
        """Waits for what only news can bring; any number may wait."""
        while not reached():
            await self._changed.wait()

    async def prompt_logprobs(self) -> AsyncIterator[PromptLogprobs]:
        """All that the request asks for, as they are made; for one reader, before tokens().

        Ends early when the run does: with an error, then. What was told is not kept.
        """
        owed = self._running.request.scored
        first = owed.start
        while first < owed.stop:
            await self.until(lambda: bool(self._scored) or self.end is not None)
            if not self._scored:
                return
            told, self._scored = self._scored[:MOST_SCORED], self._scored[MOST_SCORED:]
            yield PromptLogprobs(first=first, logprobs=tuple(told))
            first += len(told)

    async def tokens(self) -> AsyncIterator[tuple[Choice, ...]]:
        """All new ones, as many at a time as there are by then. Raises the engine's error."""
        told = 0

        def more() -> bool:
            return told < len(self.choices)

        while more() or self.end is None:
            await self.until(lambda: more() or self.end is not None)
            if more():
                choices = tuple(self.choices[told:])
                told += len(choices)
                yield choices
        self.raise_if_broken()

    async def computed_beyond(self, done: int) -> int:
        """Positions whose state is final, as soon as they are more than `done`."""
        await self.until(lambda: self.done > done or self.end is not None)
        self.raise_if_broken()
        return self.done

    def rows_of(self, layer: int) -> tuple[int, Any]:
        """Positions whose per-token rows of a layer are final, `done` or more, and for more the
        event of the device that they wait for, or None."""
        positions, event = self._ahead.get(layer, (0, None))
        return (positions, event) if positions > self.done else (self.done, None)

    def raise_if_broken(self) -> None:
        """Also when the engine has let go of it without being asked by its owner."""
        if isinstance(self.end, Broken):
            raise self.end.error
        if isinstance(self.end, Removed):
            raise WorkerLost(f"{self._running.request.request_id}: its engine has stopped")
        if isinstance(self.end, Preempted):
            raise PreemptedError(
                f"{self._running.request.request_id}: an older request needed its memory; "
                "it is prefilled again where all that it can need is free"
            )

    def hear_rows(self, layer: int, positions: int, event: Any) -> None:
        self._ahead[layer] = positions, event
        self._wake()

    def hear(self, news: News) -> None:
        self.started = True
        self.done = max(self.done, news.done)  # computed again after a failed step: the same rows
        if news.prompt is not None:  # likewise: what is known already comes once only
            fresh = news.prompt.logprobs[self._scored_to - news.prompt.first :]
            self._scored += fresh
            self._scored_to += len(fresh)
        if news.choice is not None:
            self.choices.append(news.choice)
        if news.end is not None:
            self.end, self.ended_at = news.end, time.monotonic()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Engine:
    """Owns the loop's thread. Memory is its callers': a run only borrows its lease."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        execute: Execute,
        eos_token_id: int,
        name: str,
        pace: Pace | None = None,
        settle: Settle = settled,
    ) -> None:
        """As StepLoop."""
        self._loop = StepLoop(
            schedule=schedule,
            execute=execute,
            deliver=self._deliver_later,
            name=name,
            pace=pace,
            settle=settle,
        )
        self._eos_token_id = eos_token_id
        self._runs: dict[Running, Run] = {}
        self._asyncio = asyncio.get_running_loop()
        self._name = name
        self.tokens = self.preempted = 0  # made, and runs that gave way, since the start

    async def __aenter__(self) -> Engine:
        self._loop.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Runs that are still in it are removed; the step in progress ends first."""
        if not await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S):
            logger.error("%s: the engine's step has not ended in %g s", self._name, STOP_TIMEOUT_S)

    @property
    def runs(self) -> Sequence[Run]:
        return tuple(self._runs.values())

    def health(self) -> Health:
        pending = sum(run.end is None for run in self._runs.values())  # ended ones only wait
        idle_s = time.monotonic() - self._loop.moved_at
        waits = pending and not self._loop.starved
        return Health(
            self._loop.alive, pending, self._loop.steps, max(0.0, idle_s) if waits else 0.0
        )

    def memory_is_back(self) -> None:
        """Blocks were freed: runs that wait for some may try again."""
        self._loop.memory_is_back()

    @asynccontextmanager
    async def run(
        self,
        request: Request,
        lease: Lease,
        *,
        done: int = 0,
        once: bool = False,
        by_layer: bool = False,
    ) -> AsyncIterator[Run]:
        """The request in the engine, from `done` positions on; `once` for one token only.

        `by_layer`: Run.rows_of() runs ahead of Run.done. When the block is left, however, the
        engine no longer touches the lease.
        """
        ids = stop_ids(request, self._eos_token_id)
        running = Running(request, lease, request.token_ids, done, once, stop_ids=ids)
        run = self._runs[running] = Run(running)
        if by_layer:
            running.on_rows = partial(self._soon, run.hear_rows)
        if not self._loop.add(running):
            del self._runs[running]
            raise WorkerLost(f"the engine of {self._name} is not running")
        try:
            yield run
        finally:
            await self._leave(running, run)

    async def _leave(self, running: Running, run: Run) -> None:
        """Waits for the engine to let go, even if the waiting is cancelled meanwhile."""
        cancelled = False
        if run.end is None:
            self._loop.remove(running)
        while run.end is None:
            try:
                await run.until(lambda: run.end is not None)
            except asyncio.CancelledError:
                cancelled = True
        del self._runs[running]
        if cancelled:
            raise asyncio.CancelledError

    def _deliver_later(self, news: Sequence[News]) -> None:
        self._soon(self._spread, news)

    def _soon(self, hear: Callable[..., None], *what: Any) -> None:
        """From the engine's thread."""
        try:
            self._asyncio.call_soon_threadsafe(hear, *what)
        except RuntimeError:  # the asyncio side has closed its loop: nobody is left to be told
            assert self._asyncio.is_closed()

    def _spread(self, news: Sequence[News]) -> None:
        for one in news:
            self.tokens += one.choice is not None
            self.preempted += isinstance(one.end, Preempted)
            self._runs[one.running].hear(one)
