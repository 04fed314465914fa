"""Frames: how the messages of many streams share one connection. Pure: bytes in, frames out.

A frame is a header (length of the body u32, stream u32, kind u8; big endian) and a body:

    OPEN    begins a stream; only the side that connected does that
    DATA    a whole message, or the last piece of one
    MORE    a piece of a message that goes on
    CLOSE   the sender has left the stream and hears nothing more on it
    RESET   the sender has broken the stream off; the body is an encoded Failed that says why
    PING    the sender lives

Knows nothing of sockets, and of messages only that they are bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

OPEN: Final = 0
DATA: Final = 1
MORE: Final = 2
CLOSE: Final = 3
RESET: Final = 4
PING: Final = 5

_HEADER = struct.Struct("!IIB")
HEADER_BYTES = _HEADER.size


class Frame(NamedTuple):
    """`body` is None when it was too long and has been skipped."""

    stream: int
    kind: int
    body: bytes | None


def header(stream: int, kind: int, length: int) -> bytes:
    return _HEADER.pack(length, stream, kind)


def cut(body: bytes, cut_bytes: int) -> Iterator[tuple[int, bytes | memoryview]]:
    """A message as (kind, piece) pairs, so that frames of other streams can go in between."""
    view = memoryview(body)
    last = max(0, len(body) - 1) // cut_bytes * cut_bytes
    for start in range(0, last, cut_bytes):
        yield MORE, view[start : start + cut_bytes]
    yield DATA, view[last:]


class FrameReader:
    """Bytes as they come off a socket, in; whole frames, out."""

    def __init__(self, max_body: int) -> None:
        self.max_body = max_body
        self._rest = bytearray()  # the beginning of a frame that has not come whole
        self._skip = 0  # bytes of a frame that was too long

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. At most max_body + one read is ever kept."""
        source: bytes | bytearray = data
        if self._rest:
            self._rest += data
            source = self._rest
        frames: list[Frame] = []
        end = len(source)
        at = min(self._skip, end)
        self._skip -= at
        while end - at >= HEADER_BYTES:
            length, stream, kind = _HEADER.unpack_from(source, at)
            start = at + HEADER_BYTES
            if length > self.max_body:
                frames.append(Frame(stream, kind, None))
                at = min(start + length, end)
                self._skip = start + length - at
                continue
            if start + length > end:
                break
            at = start + length
            frames.append(Frame(stream, kind, bytes(source[start:at])))
        if source is data:
            self._rest += data[at:]
        else:
            del self._rest[:at]
        return frames
