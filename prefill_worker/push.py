"""One prompt's state on its way to one reservation: rows as they become final, then a promise.

Knows nothing of how the peer was found, or of what becomes of the state there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.errors import ProtocolError, Rejected, WorkerLost, revive
from cluster.messages import (
    Accepted,
    Cancel,
    Commit,
    Failed,
    HandedOver,
    Planned,
    Pushed,
    PushOpened,
    PushTo,
    RejectedNow,
    Span,
    Unpacked,
)
from cluster.wire import Stream
from engine.engine import Run
from engine.tasks import together
from kv_transfer.blocks import Lease
from kv_transfer.cell_writer import Allowance, CellWriter
from kv_transfer.digest import RunningDigest
from kv_transfer.plan import pack_into_pushes, spans_final_at, spans_of_layer, token_layers
from kv_transfer.row_pieces import Standing
from kv_transfer.staging import push_bytes
from prefill_worker.outlet import Outlet
from prefill_worker.pair import Pair


@dataclass(frozen=True)
class Prompt:
    """What is pushed: `length` positions whose state appears in `lease` as `run` goes on."""

    request_id: str
    length: int
    lease: Lease
    run: Run


class Push:
    """Run hear() and send() together; when both are done, decode has taken the state over."""

    def __init__(
        self, outlet: Outlet, prompt: Prompt, place: PushTo, pair: Pair, stream: Stream
    ) -> None:
        self._outlet = outlet
        self._prompt = prompt
        self._place = place
        self._pair = pair
        self._stream = stream
        self._digest = RunningDigest(outlet.slab, prompt.lease)
        self._opened: asyncio.Future[PushOpened] = asyncio.get_running_loop().create_future()
        # Decode gives its cells: first all, then one by one.
        planned = outlet.planned and not pair.direct
        self._leave = Allowance()  # for a thread that writes planned pushes
        self._credits: asyncio.Semaphore | Allowance
        self._credits = self._leave if planned else asyncio.Semaphore(0)
        self._bytes = 0
        self._times: list[tuple[float, float]] = []  # of each push: from, to
        self._accepted_at = 0.0

    async def hear(self) -> None:
        """Takes decode's answers until it accepts; raises what else it decides."""
        who = f"{self._prompt.request_id}: {self._place.decode.name}"
        async for message in self._stream:
            match message:
                case PushOpened() if not self._opened.done():
                    self._opened.set_result(message)
                    for _ in range(self._place.segment.cells):
                        self._credits.release()
                case Unpacked():
                    self._credits.release()
                case Accepted():
                    self._accepted_at = time.monotonic()
                    return
                case RejectedNow() if self._opened.done():
                    raise Rejected(f"{who} rejected the state: {message.why}")
                case RejectedNow() | Cancel():  # the state has no fault: it may go elsewhere
                    raise WorkerLost(f"{who} has no reservation for it any more")
                case Failed():
                    raise revive(message.error, message.message)
                case _:
                    raise ProtocolError(f"{who} answered a push with {message.kind}")
        raise WorkerLost(f"{who} has left the push")

    async def send(self) -> None:
        """Pushes rows as they become final, then commits to them."""
        if self._pair.direct:
            await self._send_by_layer()
        elif self._outlet.planned:
            await self._send_as_planned()
        else:
            await self._send_by_chunk()
        prompt = self._prompt
        pieces = tuple(self._digest.pieces(self._outlet.fields, prompt.length))
        first_token = prompt.run.new_ids[0]
        await self._stream.send(
            Commit(length=prompt.length, first_token=first_token, pieces=pieces)
        )

    # ---------------------------------------------------------------- packed, into its ring

    async def _send_by_chunk(self) -> None:
        prompt, outlet = self._prompt, self._outlet
        await self._opened_and_measured()
        pushed = 0
        while pushed < prompt.length:
            done = await prompt.run.computed_beyond(pushed)
            spans = spans_final_at(outlet.fields, pushed, done, done == prompt.length)
            for some in pack_into_pushes(spans, outlet.slab.layout, self._cell_bytes):
                await self._write(some)
            pushed = done

    @property
    def _cell_bytes(self) -> int:
        return min(self._place.segment.cell_bytes, self._outlet.cell_bytes)

    async def _opened_and_measured(self) -> None:
        await self._opened
        if self._pair.report is None:  # no cell of theirs was this rank's before
            offset = self._place.segment.offset
            self._pair.report = await self._outlet.measure(self._pair.peer, offset)

    async def _write(self, spans: Sequence[Span]) -> None:
        assert isinstance(self._credits, asyncio.Semaphore)
        await self._credits.acquire()
        segment = self._place.segment
        offset = segment.offset + len(self._times) % segment.cells * segment.cell_bytes
        started = time.monotonic()
        self._bytes += await self._outlet.write(
            spans, self._prompt.lease, self._digest, self._pair.peer, offset
        )
        await self._announce(spans, started)

    # ---------------------------------------------------------------- packed by a device

    async def _send_as_planned(self) -> None:
        """What will be pushed is known before it exists: both sides get ready for all of it."""
        await self._opened_and_measured()
        prompt, outlet = self._prompt, self._outlet
        plan = self._plan()
        pushes = [spans for _, some in plan for spans in some]
        writes = outlet.planned_writes(prompt.lease, pushes, self._pair.peer, self._place.segment)
        async with writes as writer:
            await self._stream.send(Planned(pushes=tuple(tuple(spans) for spans in pushes)))
            written: asyncio.Queue[float] = asyncio.Queue()
            await together(
                self._say_what_stands(plan),
                self._write_planned(writer, pushes, written),
                self._announce_written(written, len(pushes)),
            )

    def _plan(self) -> list[tuple[int, list[list[Span]]]]:
        """Pushes by the positions that have to be computed for them: first what is there."""
        prompt, outlet = self._prompt, self._outlet
        step = outlet.chunk_tokens or prompt.length
        done, plan = prompt.run.done, []
        first = done or min(step, prompt.length)
        begun = 0
        for stop in (*range(first, prompt.length, step), prompt.length):
            spans = spans_final_at(outlet.fields, begun, stop, stop == prompt.length)
            plan.append((stop, pack_into_pushes(spans, outlet.slab.layout, self._cell_bytes)))
            begun = stop
        return plan

    async def _say_what_stands(self, plan: Sequence[tuple[int, Sequence[object]]]) -> None:
        ready = 0
        with self._or_give_up():
            for stop, pushes in plan:
                await self._prompt.run.computed_beyond(stop - 1)
                ready += len(pushes)
                self._leave.rows_stand(ready)

    async def _write_planned(
        self, writer: CellWriter, pushes: Sequence[Sequence[Span]], written: asyncio.Queue[float]
    ) -> None:
        loop = asyncio.get_running_loop()

        def told(_: int, began: float) -> None:
            loop.call_soon_threadsafe(written.put_nowait, began)

        digests = await self._outlet.run(writer, self._leave, told)
        self._digest.add_known([span for spans in pushes for span in spans], digests)
        layout = self._outlet.slab.layout
        self._bytes += sum(push_bytes(layout, spans) for spans in pushes)

    async def _announce_written(self, written: asyncio.Queue[float], count: int) -> None:
        with self._or_give_up():
            for _ in range(count):
                await self._announce((), await written.get())

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """The writing thread does not wait for what will not come."""
        try:
            yield
        except BaseException:
            self._leave.give_up()
            raise

    # ---------------------------------------------------------------- direct, into its blocks

    async def _send_by_layer(self) -> None:
        """Rows of a layer while later layers run; what changes with every position at the end."""
        prompt, fields, run = self._prompt, self._outlet.fields, self._prompt.run
        assert self._pair.there is not None
        there = self._pair.there.standing(await self._opened, prompt.length)
        reached = dict.fromkeys(token_layers(fields), 0)
        ends = spans_final_at(fields, prompt.length, prompt.length, last=True)
        push_ends = await self._outlet.prepare_push(  # somebody waits for this one
            ends, prompt.lease, self._digest, self._pair.peer, there
        )

        def news() -> bool:
            return any(run.rows_of(layer)[0] > done for layer, done in reached.items())

        while run.done < prompt.length:
            await run.until(lambda: news() or run.end is not None)
            run.raise_if_broken()
            settled: list[Span] = []
            for layer, done in reached.items():
                reached[layer], event = run.rows_of(layer)
                spans = spans_of_layer(fields, layer, done, reached[layer])
                if event is None:
                    settled += spans
                else:
                    await self._push(spans, there, event)
            await self._push(settled, there)
        rest = [
            span
            for layer, done in reached.items()
            for span in spans_of_layer(fields, layer, done, prompt.length)
        ]
        await self._push(rest, there)
        started = time.monotonic()
        self._bytes += await push_ends()
        await self._announce(ends, started)

    async def _push(self, spans: Sequence[Span], there: Standing, after: Any = None) -> None:
        outlet = self._outlet
        for some in pack_into_pushes(spans, outlet.slab.layout, outlet.direct_bytes):
            started = time.monotonic()
            self._bytes += await outlet.push(
                some, self._prompt.lease, self._digest, self._pair.peer, there, after
            )
            await self._announce(some, started)

    # ---------------------------------------------------------------- either

    async def _announce(self, spans: Sequence[Span], started: float) -> None:
        seq = len(self._times)
        self._times.append((started, time.monotonic()))
        await self._stream.send(Pushed(seq=seq, spans=tuple(spans)))

    def report(self) -> HandedOver:
        computed_at = self._prompt.run.ended_at
        return HandedOver(
            reservation=self._place.reservation,
            bytes_moved=self._bytes,
            pushes=len(self._times),
            push_s=sum(end - start for start, end in self._times),
            hidden_s=sum(max(0.0, min(end, computed_at) - start) for start, end in self._times),
            tail_s=self._accepted_at - computed_at,
            path=self._pair.path,
        )
