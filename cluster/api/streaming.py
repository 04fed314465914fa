"""A client that goes away, and a stream that goes out.

Knows nothing of what is streamed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.before_waiting import before_waiting
from cluster.api.front import set_outcome
from cluster.api.request_body import ClientGone
from cluster.errors import ClusterError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Json = dict[str, Any]

MOST_TOGETHER = 16384  # bytes of events in one write, so that a slow reader is noticed


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
    error is the last event, in the dialect's error shape, without [DONE]. Events that are there
    together go out in one write. The next event is asked for when the last one is with the
    network: a slow reader slows its own generation, and after `stall_s` without a byte read it
    counts as gone.
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
        async with aclosing(self._events) as events, _Outbox(send, self._stall_s) as outbox:
            event = await anext(events)
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                while True:
                    await outbox.put(event)
                    event = await before_waiting(anext(events), outbox.flush)
            except StopAsyncIteration:
                last = b"[DONE]"
            except ClusterError as error:
                last, outcome = self._error(error), "error"
            except Exception:
                logger.exception("a stream broke")
                last, outcome = self._error(ClusterError("internal error; see the log")), "error"
            await outbox.put(last)
            await outbox.flush()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome

    def _error(self, error: ClusterError) -> bytes:
        return json.dumps(self._error_body(error)).encode()


class _Outbox:
    """Events on their way out. `async with`: ClientGone if the client reads nothing for long."""

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self._stalled = asyncio.timeout(None)
        self._watched = False
        self._parts: list[bytes] = []
        self._size = 0

    async def put(self, event: bytes) -> None:
        """To go out with the next flush, which is now if there is much already."""
        self._parts += (b"data: ", event, b"\n\n")
        self._size += len(event)
        if self._size > MOST_TOGETHER:
            await self.flush()

    async def flush(self) -> None:
        """Returns when all of it is with the network."""
        if not self._parts:
            return
        body = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        message = {"type": "http.response.body", "body": body, "more_body": True}
        await before_waiting(self._send(message), self._watch)
        if self._watched:
            self._stalled.reschedule(None)
            self._watched = False

    async def _watch(self) -> None:
        """Only a send that waits has a deadline: to set one for each costs as much as to send."""
        self._stalled.reschedule(asyncio.get_running_loop().time() + self._stall_s)
        self._watched = True

    async def __aenter__(self) -> _Outbox:
        await self._stalled.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._stalled.__aexit__(*error)
        except TimeoutError:
            raise ClientGone(f"the client read nothing for {self._stall_s:g} s") from None
