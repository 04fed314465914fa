"""A prefill rank: runs prompts, says the first token, and brings the state where it is wanted.

It never chooses a decode rank and never retries: its caller does. A prompt's lease lasts until
decode has accepted the state, or until the caller has gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from typing import ClassVar

from cluster.errors import ClusterError, Draining, ProtocolError, TransferError, WorkerLost
from cluster.messages import (
    AskPairs,
    Hello,
    Prefill,
    PushFailed,
    PushTo,
    Request,
    Role,
    Started,
    WireMessage,
)
from cluster.wire import Stream
from engine.choice import as_message
from engine.rank import Rank
from engine.request import Finished, check
from engine.schedule import Schedule
from engine.tasks import beside, while_wanted
from prefill_worker.outlet import Outlet
from prefill_worker.push import Prompt
from prefill_worker.scheduler import schedule
from prefill_worker.sender import Sender

Places = asyncio.Queue[PushTo]
"""Where the caller wants one prompt's state, the newest last."""


class PrefillRank(Rank):
    role: ClassVar[Role] = "prefill"

    @property
    def schedule(self) -> Schedule:
        return partial(schedule, chunk_tokens=self.section.chunk_tokens)

    @asynccontextmanager
    async def transfers(self) -> AsyncIterator[None]:
        self._homeless_blocks = 0  # of prompts that are done but not handed over
        outlet = Outlet(
            slab=self.slab,
            fields=self.fields,
            transport=self.transport,
            cell_bytes=self.config.transfer.cell_bytes,
            cells=self.config.transfer.cells,
            chunk_tokens=self.section.chunk_tokens,
        )
        self._by_layer = self.transport.direct is not None  # a packed push gains nothing
        async with Sender(
            outlet=outlet, peers=self.peers, wire_form=self.wire_form
        ) as self._sender:
            yield

    def status(self) -> dict[str, object]:
        return super().status() | {
            "paired_with": self._sender.paired_with,
            "homeless_blocks": self._homeless_blocks,
            "moved": {path: asdict(moved) for path, moved in self._sender.moved.items()},
            "met": [
                {"path": path, "outcome": outcome, "number": number}
                for (path, outcome), number in self._sender.met.items()
            ],
            "pairs": [pair.model_dump() for pair in self._sender.pairs().pairs],
        }

    def may_admit(self) -> bool:
        """No new prompt while half the blocks wait for a place: decode is the bottleneck then."""
        return self._homeless_blocks * 2 <= self.section.num_blocks

    async def answer(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        if isinstance(first, AskPairs):
            await stream.send(self._sender.pairs())
            return
        if not isinstance(first, Prefill):
            raise ProtocolError(f"{self.name} is a prefill rank; it cannot answer {first.kind}")
        request = first.request
        if self.draining:
            raise Draining(f"{self.name} takes no new prompts; ask for another worker")
        check(request, self.limits, held=len(request.token_ids))
        places: Places = asyncio.Queue()

        def hear(message: WireMessage) -> None:
            if not isinstance(message, PushTo):
                raise ProtocolError(f"{message.kind} does not belong to a prefill")
            places.put_nowait(message)

        await while_wanted(stream, self._prefill(stream, request, places), hear)

    async def _prefill(self, stream: Stream, request: Request, places: Places) -> None:
        """The life of one prompt here: queued, computed, answered, handed over."""
        queued_at = time.monotonic()
        length = len(request.token_ids)
        async with (
            self.admission.lease(length) as lease,
            self.engine.run(request, lease, once=True, by_layer=self._by_layer) as run,
        ):
            await run.until(lambda: run.started)
            await stream.send(Started(queued_s=time.monotonic() - queued_at))
            prompt = Prompt(request.request_id, length, lease, run)
            async with beside(self._hand_over(stream, prompt, places)) as handing_over:
                async for scored in run.prompt_logprobs():
                    await stream.send(scored)
                await run.until(lambda: run.end is not None)
                run.raise_if_broken()
                finish = run.end.reason if isinstance(run.end, Finished) else None
                await stream.send(as_message(request.output_length, run.choices, finish))
                if finish is not None:  # with its first token: nobody continues it
                    return
                with self._homeless(len(lease.block_ids)):
                    await handing_over

    async def _hand_over(self, stream: Stream, prompt: Prompt, places: Places) -> None:
        """Until some decode rank has accepted the state; while none has, the state stays here."""
        place = await places.get()
        while True:
            try:
                handed_over = await self._sender.push(prompt, place)
            except (WorkerLost, TransferError) as error:
                await stream.send(PushFailed(reservation=place.reservation, why=str(error)))
                place = await self._another_place(places, error)
            else:
                await stream.send(handed_over)
                return

    async def _another_place(self, places: Places, lost: ClusterError) -> PushTo:
        """The caller seeks one, for as long as he has patience; then it ends with `lost`."""
        patience_s = self.config.wire.t_detect_s + self.config.generation.reserve_timeout_s
        try:
            async with asyncio.timeout(patience_s):
                return await places.get()
        except TimeoutError:
            raise lost from None

    @contextmanager
    def _homeless(self, blocks: int) -> Iterator[None]:
        self._homeless_blocks += blocks
        try:
            yield
        finally:
            self._homeless_blocks -= blocks
            self.admission.admit()
