"""One conversation on a connection: messages in order, both ways, until either side leaves it.

Leaving is mutual and at once: after close() neither side hears the other on this stream. Knows
nothing of sockets; the connection gives it pieces of messages and takes whole ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING

from cluster import frame
from cluster.codec import decode, encode
from cluster.errors import ClusterError, ProtocolError, RequestCancelled, WorkerLost, revive
from cluster.messages import Failed, WireMessage

if TYPE_CHECKING:
    from cluster.connection import Connection


class Stream:
    """Made by Connection.open() on one side and given to the server's handler on the other."""

    def __init__(
        self, connection: Connection, number: int, *, opened_here: bool, max_bytes: int, depth: int
    ) -> None:
        self.number = number
        self.sending = asyncio.Lock()  # held while a message goes out in pieces
        self._connection = connection
        self._opened_here = opened_here
        self._max_bytes = max_bytes
        self._depth = depth
        self._messages: deque[bytes] = deque()  # received, not yet read
        self._queued = 0  # their bytes
        self._piece = bytearray()  # the beginning of a message that has not come whole
        self._ended = False
        self._failure: Failed | None = None  # why it ended, unless somebody left in order
        self._reader: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """Nothing more can be sent; what has come already can still be received."""
        return self._ended

    async def send(self, message: WireMessage) -> None:
        """Returns when the message is on its way; waits its turn while the peer reads slowly.

        WorkerLost when the connection is lost, or when the server has left the conversation;
        RequestCancelled when the one who opened it has; ProtocolError for too long a message.
        """
        self.require_open()
        body = encode(message)
        if len(body) > self._max_bytes:
            raise ProtocolError(
                f"a {message.kind} message of {len(body)} bytes is more than the "
                f"{self._max_bytes} that {self._connection.label} takes (wire.max_frame_bytes)"
            )
        await self._connection.write(self, body)

    async def receive(self) -> WireMessage | None:
        """The next message; None when the peer, or this side, has left in order.

        WorkerLost when the connection is lost; ProtocolError for what is no message, or when the
        stream was broken off. Failed is a message like any other. One reader at a time.
        """
        while not self._messages:
            if self._failure is not None:
                raise _error(self._failure)
            if self._ended:
                return None
            assert self._reader is None, "a stream has one reader"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        body = self._messages.popleft()
        self._queued -= len(body)
        return decode(body)

    async def close(self) -> None:
        """Leave, and tell the peer at once. Never waits; closing again is harmless."""
        if not self._ended:
            self._connection.put(self.number, frame.CLOSE)
            self._connection.forget(self)
        self._messages.clear()
        self._queued = 0
        self.end(None)

    def reset(self, error: ClusterError) -> None:
        """Break this stream off, and no other: both sides get `error`."""
        if self._ended:
            return
        failure = Failed(error=error.kind, message=str(error))
        self._connection.put(self.number, frame.RESET, encode(failure))
        self._connection.forget(self)
        self._messages.clear()
        self.end(failure)

    def __aiter__(self) -> AsyncIterator[WireMessage]:
        return self

    async def __anext__(self) -> WireMessage:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ for the connection

    def require_open(self) -> None:
        if not self._ended:
            return
        if self._failure is not None:
            raise _error(self._failure)
        if self._opened_here:
            raise WorkerLost(f"{self._connection.label} has ended the conversation")
        raise RequestCancelled(f"{self._connection.label} has left the conversation")

    def feed(self, body: bytes, *, whole: bool) -> None:
        """A message, or a piece of one, has come. Breaks the stream off when it is too much."""
        if len(self._piece) + len(body) > self._max_bytes:
            self.reset(ProtocolError(f"a message of more than {self._max_bytes} bytes was refused"))
            return
        if not whole:
            self._piece += body
            return
        if len(self._messages) >= self._depth or self._queued > self._max_bytes:
            self.reset(
                ProtocolError(
                    f"{len(self._messages)} messages ({self._queued} bytes) were not read in time"
                )
            )
            return
        if self._piece:
            body = bytes(self._piece + body)
            self._piece = bytearray()
        self._messages.append(body)
        self._queued += len(body)
        self._wake()

    def end(self, failure: Failed | None) -> None:
        """Nothing more will come, because of `failure` or because somebody left."""
        if self._ended:
            return
        self._ended = True
        self._failure = failure
        self._piece = bytearray()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _error(failure: Failed) -> ClusterError:
    return revive(failure.error, failure.message, failure.retry_after_s)
