"""One TCP connection that carries many streams, each at its own pace.

Both sides send PING every heartbeat_s; a side that has heard nothing for t_detect_s gives the
peer up. Small frames of one turn of the event loop leave in one write. While the socket is full,
streams take turns piece by piece, so that nobody waits for the whole of a neighbour's message.
No task runs here: everything happens in callbacks and in the tasks of those who send and receive.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

from cluster import frame
from cluster.codec import decode
from cluster.config import WireSection
from cluster.errors import ClusterError, ProtocolError, WorkerLost
from cluster.frame import FrameReader, cut
from cluster.handshake import GREETING_BYTES
from cluster.messages import Failed, Hello, WireMessage
from cluster.stream import Stream

MAX_STREAMS = 1 << 16
FLUSH_BYTES = 64 << 10  # frames gathered before they are written without waiting for the turn's end
HIGH_WATER_BYTES = 256 << 10  # in the transport's buffer; above it, senders wait
CLOSE_WAIT_S = 1.0  # for what is written to leave, before the connection is cut


class Connection(asyncio.Protocol):
    """Made by wire.connect() and wire.serve(); `peer` is who proved itself on the other side."""

    peer: Hello

    def __init__(
        self,
        config: WireSection,
        *,
        label: str = "the peer",
        on_made: Callable[[Connection], None] | None = None,
        on_open: Callable[[Connection, Stream], None] | None = None,
    ) -> None:
        self.label = label  # who is at the other end, in messages for people
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._config = config
        self._on_made = on_made
        self._on_open = on_open  # None: only this side opens streams
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(GREETING_BYTES)
        self._proved = False
        self._failure: Failed | None = None  # why it is lost
        self._next_number = 1
        self._out: list[bytes | memoryview] = []
        self._out_bytes = 0
        self._full = False  # the transport asked us to wait
        self._turns: deque[asyncio.Future[None]] = deque()  # senders, in the order of their turn
        self._heard_at = self._ticked_at = self._loop.time()
        self._tick_due_s = 0.0
        self._ticker: asyncio.TimerHandle | None = None
        self.greeting = self._stream(0, opened_here=True, max_bytes=GREETING_BYTES, depth=2)
        self._streams: dict[int, Stream] = {0: self.greeting}

    @property
    def lost(self) -> bool:
        return self._failure is not None

    async def open(self, first: WireMessage) -> Stream:
        """A new stream that begins with `first`. WorkerLost when the connection is lost."""
        if self._failure is not None:
            raise WorkerLost(self._failure.message)
        stream = self._stream(self._next_number, opened_here=True)
        self._next_number += 1
        self._streams[stream.number] = stream
        self.put(stream.number, frame.OPEN)
        try:
            await stream.send(first)
        except BaseException:
            await stream.close()
            raise
        return stream

    async def close(self) -> None:
        """Send what is written, then hang up. Every stream on it ends with WorkerLost."""
        self._lose(WorkerLost(f"the connection to {self.label} was closed by this side"))
        self._flush()
        self._transport.close()
        done, _ = await asyncio.wait([self.gone], timeout=CLOSE_WAIT_S)
        if not done:
            self.abort()
            await self.wait_lost()

    def abort(self) -> None:
        """Hang up now, whatever is still unsent."""
        self._lose(WorkerLost(f"the connection to {self.label} was cut by this side"))
        self._transport.abort()

    async def wait_lost(self) -> None:
        """Returns when the connection is no more."""
        await asyncio.shield(self.gone)

    def prove(self, peer: Hello) -> None:
        """The peer has proved the secret: read frames of full size, and keep watch over it."""
        self.peer = peer
        self._proved = True
        self._reader.max_body = self._config.max_frame_bytes
        self._streams.pop(0, None)
        self._heard_at = self._ticked_at = self._loop.time()
        self._tick()

    # ------------------------------------------------------------ for streams

    def put(self, number: int, kind: int, body: bytes | memoryview = b"") -> None:
        """A frame, behind those already put. It leaves at the end of this turn of the loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame.header(number, kind, len(body)))
        if body:
            self._out.append(body)
        self._out_bytes += frame.HEADER_BYTES + len(body)
        if self._out_bytes >= FLUSH_BYTES:
            self._flush()

    async def write(self, stream: Stream, body: bytes) -> None:
        """One message of a stream: whole if it is small and the road is free, else in turns."""
        road_is_free = not self._full and not self._turns and not stream.sending.locked()
        if road_is_free and len(body) <= self._config.cut_bytes:
            self.put(stream.number, frame.DATA, body)
            return
        async with stream.sending:
            begun = False
            try:
                for kind, piece in cut(body, self._config.cut_bytes):
                    await self._turn()
                    stream.require_open()
                    self.put(stream.number, kind, piece)
                    begun = True
                    self._loop.call_soon(self._next_turn)
            except asyncio.CancelledError:
                if begun:  # the peer holds the beginning of a message that will never be whole
                    stream.reset(ProtocolError("a message was given up half sent"))
                raise

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)

    async def _turn(self) -> None:
        """Until the socket takes more and everybody who came before has had a turn."""
        turn = self._loop.create_future()
        self._turns.append(turn)
        if len(self._turns) == 1 and not self._full:
            self._loop.call_soon(self._next_turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._next_turn()  # it may have been ours already
            raise

    def _next_turn(self) -> None:
        while self._turns and not self._full:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _flush(self) -> None:
        out, self._out, self._out_bytes = self._out, [], 0
        if out and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    def _stream(
        self, number: int, *, opened_here: bool, max_bytes: int | None = None, depth: int = 0
    ) -> Stream:
        return Stream(
            self,
            number,
            opened_here=opened_here,
            max_bytes=max_bytes or self._config.max_frame_bytes,
            depth=depth or self._config.queue_messages,
        )

    # ------------------------------------------------------------ for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for number, kind, body in self._reader.feed(data):
                self._take(number, kind, body)
        except ProtocolError as error:
            self._lose(error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        why = f": {error}" if error else ""
        self._lose(WorkerLost(f"{self.label} closed the connection{why}"))
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._next_turn()

    # ------------------------------------------------------------ inside

    def _take(self, number: int, kind: int, body: bytes | None) -> None:
        if not self._proved and (body is None or number or kind not in (frame.DATA, frame.PING)):
            raise ProtocolError("the peer said something before it proved who it is")
        stream = self._streams.get(number)
        if kind == frame.PING or self.lost:
            return
        if kind == frame.OPEN:
            self._begin(number)
        elif kind not in (frame.DATA, frame.MORE, frame.CLOSE, frame.RESET):
            raise ProtocolError(f"frames of kind {kind} do not exist")
        elif stream is None:
            return  # this side has just left it; the peer will know in a moment
        elif body is None:
            limit = self._config.max_frame_bytes
            stream.reset(ProtocolError(f"a frame of more than {limit} bytes was refused"))
        elif kind == frame.DATA or kind == frame.MORE:
            stream.feed(body, whole=kind == frame.DATA)
        else:
            self.forget(stream)
            stream.end(_failure(body) if kind == frame.RESET else None)

    def _begin(self, number: int) -> None:
        if self._on_open is None or number < self._next_number:
            raise ProtocolError(f"the peer may not open stream {number}")
        self._next_number = number + 1
        stream = self._stream(number, opened_here=False)
        if len(self._streams) >= MAX_STREAMS:
            stream.reset(ProtocolError(f"more than {MAX_STREAMS} streams on one connection"))
            return
        self._streams[number] = stream
        self._on_open(self, stream)

    def _lose(self, error: ClusterError) -> None:
        """End every stream with `error`; the first reason is the one that counts."""
        if self._failure is not None:
            return
        self._failure = Failed(error=error.kind, message=str(error))
        if self._ticker is not None:
            self._ticker.cancel()
        for stream in list(self._streams.values()):
            stream.end(self._failure)
        self._streams.clear()
        for turn in self._turns:
            if not turn.done():
                turn.set_result(None)  # its sender finds the stream ended
        self._turns.clear()

    def _tick(self) -> None:
        """Say that we live; give the peer up if it has not said so for too long."""
        now = self._loop.time()
        stalled_s = now - self._ticked_at - self._tick_due_s
        if stalled_s > self._config.heartbeat_s:
            self._heard_at += (
                stalled_s  # we did not listen: our own pause is not the peer's silence
            )
        silent_s = now - self._heard_at
        if silent_s >= self._config.t_detect_s:
            self._lose(WorkerLost(f"{self.label} has said nothing for {silent_s:.1f} s"))
            self._transport.abort()
            return
        self.put(0, frame.PING)
        self._ticked_at = now
        self._tick_due_s = min(self._config.heartbeat_s, self._config.t_detect_s - silent_s)
        self._ticker = self._loop.call_later(self._tick_due_s, self._tick)


def _failure(body: bytes) -> Failed:
    message = decode(body)
    if not isinstance(message, Failed):
        raise ProtocolError("a stream was broken off without a reason")
    return message
