"""What uvicorn leaves open about a connection: slow heads, long heads, clients that half-close.

A request's head must come within a time and a size; uvicorn bounds neither. And the end of what a
client sends is not yet its leaving: who has shut down only its own direction (`nc -N`, some
proxies) waits for the answer. TCP says the same for both, so until the answer begins we send a
"100 Continue" now and then, which any client skips and which breaks a connection whose other end
is closed. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cluster.api.openai import error_body
from cluster.errors import BadRequest

MOST_HEAD_BYTES = 65536
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_SOON_S = 0.1  # the first probe makes the other end say that it is gone, the second hears it
LINGER_S = 1.0  # a socket that is closed with data unread takes back what it has said last
PROBE_S = 1.0  # half of the time in which a client's leaving must be noticed


class HeadTooSlow(BadRequest):
    status = 408


class HeadTooLarge(BadRequest):
    status = 431


def http_connection(head_timeout_s: float) -> type[asyncio.Protocol]:
    """The class of uvicorn's connections, for uvicorn.Config(http=...)."""

    class Connection(_Connection):
        timeout_s = head_timeout_s

    return Connection


class _Connection(AutoHTTPProtocol):  # type: ignore[valid-type,misc]  # whichever is installed
    timeout_s: float
    _slow: asyncio.TimerHandle | None = None  # runs while a head is incomplete
    _probing: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None  # refused; what still comes is not read
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            return
        if self._slow is None and not self._is_busy():
            self._await_head()
        super().data_received(data)
        if self._is_busy():
            self._stop(self._slow)
            self._slow = None
        elif self._slow is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(HeadTooLarge(f"the head is longer than {MOST_HEAD_BYTES} bytes"))

    def eof_received(self) -> bool:
        """Whether to keep the connection: the client may still be listening."""
        if not self._is_busy() or self.cycle.response_started or not self._knows_continue():
            return False
        if self.cycle.more_body:  # the rest of it can never come
            return False
        self.cycle.keep_alive = False  # nor can another request
        self._probe(PROBE_SOON_S)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._stop(self._slow)
        self._stop(self._probing)
        self._stop(self._lingering)
        super().connection_lost(error)

    def _is_busy(self) -> bool:
        """A request is known and its answer not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _knows_continue(self) -> bool:
        return bool(self.cycle.scope["http_version"] == "1.1")

    def _await_head(self) -> None:
        self._head_bytes = 0
        too_slow = HeadTooSlow(f"the head did not come within {self.timeout_s:g} s")
        self._slow = self.loop.call_later(self.timeout_s, self._refuse, too_slow)

    def _probe(self, again_s: float) -> None:
        if not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(PROBE)
            self._probing = self.loop.call_later(again_s, self._probe, PROBE_S)

    def _refuse(self, error: BadRequest) -> None:
        body = json.dumps(error_body(error)).encode()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (error.status, error.kind.encode(), len(body), body)
        )
        self.transport.write_eof()
        self._lingering = self.loop.call_later(LINGER_S, self.transport.close)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
