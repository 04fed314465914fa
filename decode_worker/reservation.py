"""Memory that waits for one prompt's state, and who may still touch it. Knows no messages."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from cluster.errors import ClusterError
from cluster.messages import Cancel, Request
from cluster.wire import Stream
from kv_transfer.blocks import Lease
from kv_transfer.ring import SegmentLease


class Reservation:
    """`id` is never used twice.

    Two sides hold on to it: its caller, from reserve() to release(), and the one who was told
    where to write, from begin_writing() to end_writing(). Whoever leaves last frees the memory;
    in between it is in quarantine.
    """

    def __init__(self, id: str, request: Request, lease: Lease, segment: SegmentLease) -> None:
        self.id = id
        self.request = request
        self.length = request.prompt_length + request.output_length
        self.lease = lease
        self.segment = segment
        self.first_token: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.writer: str | None = None  # the incarnation that may write into it
        self._push: Stream | None = None  # on which it can be told to stop

    @property
    def open(self) -> bool:
        """Its caller still waits for the state."""
        return not self.first_token.done()

    def fail(self, error: ClusterError) -> None:
        if self.open:
            self.first_token.set_exception(error)
            self.first_token.exception()  # the caller may have gone: then nobody asks for it

    # ---------------------------------------------------------------- who writes

    def begin_writing(self, writer: str, push: Stream, *, direct: bool) -> None:
        """From here on the writer may write: into the blocks if it is direct, else the segment."""
        self.writer, self._push = writer, push
        if direct:
            self.segment.release()

    def stream_ended(self) -> None:
        self._push = None

    def end_writing(self) -> None:
        """Nothing can be written into it any more: the end of a quarantine, if it is in one."""
        self.writer = self._push = None
        self.segment.release()
        self.segment.clear()
        self.lease.clear()

    # ---------------------------------------------------------------- its caller

    async def left(self) -> bool:
        """The caller needs it no more; whether the lease is anybody's to release."""
        self.first_token.cancel()
        if self.writer is None:
            self.segment.release()
            return True
        if self.segment.state == "leased":
            self.segment.quarantine(self.id)
        self.lease.quarantine(self.id)
        if self._push is not None:
            with suppress(ClusterError):
                await self._push.send(Cancel())
        return False
