"""A client that goes away, a body that comes in, and a stream that goes out.

Knows nothing of what is streamed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.front import set_outcome
from cluster.errors import BadRequest, ClusterError, RequestCancelled

logger = logging.getLogger(__name__)
T = TypeVar("T")
Json = dict[str, Any]


class ClientGone(RequestCancelled):
    """Nobody is there any more to be told anything."""


class BodyTooLarge(BadRequest):
    status = 413


class BodyTooSlow(BadRequest):
    status = 408


async def read_body(http: HttpRequest, max_bytes: int, within_s: float) -> bytes:
    """The whole body. BodyTooLarge as soon as it is longer or says that it will be, BodyTooSlow if
    it does not come."""
    too_large = BodyTooLarge(f"the body is longer than {max_bytes} bytes")
    declared = http.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for piece in http.stream():
                body += piece
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise BodyTooSlow(f"the body did not come within {within_s:g} s") from None
    except ClientDisconnect:
        raise ClientGone("the client went away") from None
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. A client that leaves cancels it at once: ClientGone.

    The body must have been read: all that can still come from the client is its leaving.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("the client went away")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one JSON text each, then [DONE].

    Headers go out with the first event, so an error before it still has its HTTP status. A later
    error is the last event, in the dialect's error shape, without [DONE]. The next event is asked
    for when the last one is with the network: a slow reader slows its own generation, and after
    `stall_s` without a byte read it counts as gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        error_body: Callable[[ClusterError], Json],
        stall_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._events = events
        self._error_body = error_body
        self._stall_s = stall_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises only what happened before the first byte."""
        try:
            outcome = await while_connected(receive, self._send_all(send))
        except ClientGone:
            outcome = "cancelled"
        if outcome is not None:
            set_outcome(scope, outcome)

    async def _send_all(self, send: Send) -> str | None:
        """How it ended, if it did not end well."""
        outcome = None
        async with aclosing(self._events) as events:
            event = await anext(events)
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                await self._send(send, b"data: %b\n\n" % event)
                async for event in events:
                    await self._send(send, b"data: %b\n\n" % event)
                last = b"data: [DONE]\n\n"
            except ClientGone:
                raise
            except ClusterError as error:
                last, outcome = self._error_event(error), "error"
            except Exception:
                logger.exception("a stream broke")
                last = self._error_event(ClusterError("internal error; see the log"))
                outcome = "error"
        await self._send(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome

    async def _send(self, send: Send, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientGone(f"the client read nothing for {self._stall_s:g} s") from None

    def _error_event(self, error: ClusterError) -> bytes:
        return b"data: %b\n\n" % json.dumps(self._error_body(error)).encode()
