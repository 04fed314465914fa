"""One prompt's state on its way to one reservation: rows as they become final, then a promise.

Knows nothing of how the peer was found, or of what becomes of the state there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import ProtocolError, Rejected, WorkerLost, revive
from cluster.messages import (
    Accepted,
    Cancel,
    Commit,
    Failed,
    HandedOver,
    Pushed,
    PushOpened,
    PushTo,
    RejectedNow,
    Span,
    Unpacked,
)
from cluster.wire import Stream
from engine.engine import Run
from kv_transfer.blocks import Lease
from kv_transfer.digest import RunningDigest
from kv_transfer.plan import pack_into_pushes, spans_final_at, spans_of_layer, token_layers
from kv_transfer.row_pieces import Standing
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
        self._credits = asyncio.Semaphore(0)  # decode gives its cells: first all, then one by one
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
        await (self._send_by_layer() if self._pair.direct else self._send_by_chunk())
        prompt = self._prompt
        pieces = tuple(self._digest.pieces(self._outlet.fields, prompt.length))
        first_token = prompt.run.new_ids[0]
        await self._stream.send(
            Commit(length=prompt.length, first_token=first_token, pieces=pieces)
        )

    # ---------------------------------------------------------------- packed, into its ring

    async def _send_by_chunk(self) -> None:
        prompt, outlet = self._prompt, self._outlet
        await self._opened
        if self._pair.report is None:  # no cell of theirs was this rank's before
            self._pair.report = await outlet.measure(self._pair.peer, self._place.segment.offset)
        cell_bytes = min(self._place.segment.cell_bytes, outlet.cell_bytes)
        pushed = 0
        while pushed < prompt.length:
            done = await prompt.run.computed_beyond(pushed)
            spans = spans_final_at(outlet.fields, pushed, done, done == prompt.length)
            for some in pack_into_pushes(spans, outlet.slab.layout, cell_bytes):
                await self._write(some)
            pushed = done

    async def _write(self, spans: Sequence[Span]) -> None:
        await self._credits.acquire()
        segment = self._place.segment
        offset = segment.offset + len(self._times) % segment.cells * segment.cell_bytes
        started = time.monotonic()
        self._bytes += await self._outlet.write(
            spans, self._prompt.lease, self._digest, self._pair.peer, offset
        )
        await self._announce(spans, started)

    # ---------------------------------------------------------------- direct, into its blocks

    async def _send_by_layer(self) -> None:
        """Rows of a layer while later layers run; what changes with every position at the end."""
        prompt, fields, run = self._prompt, self._outlet.fields, self._prompt.run
        assert self._pair.there is not None
        there = self._pair.there.standing(await self._opened, prompt.length)
        reached = dict.fromkeys(token_layers(fields), 0)

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
        rest += spans_final_at(fields, prompt.length, prompt.length, last=True)
        await self._push(rest, there)

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
