"""One HTTP port: shared by replicas of one cluster while one replaces the other, by nobody else.

SO_REUSEPORT lets the new server listen while the old one drains, but it would also let another
cluster of the same user in, silently. So whoever listens also holds an abstract unix socket named
after the port, which answers with the owner's fingerprint. The kernel drops it with its process.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import socket
from contextlib import suppress

from cluster.errors import StartupError

RETRY_S = 0.2  # between tries for a guard that its holder is just giving up
TRIES = 10
ANSWER_S = 2.0


def fingerprint(secret: bytes) -> bytes:
    """Tells one cluster from another without telling its secret."""
    return hashlib.sha256(b"tandem http port\0" + secret).digest()


class HttpPort:
    """A listening socket and its guard; `close` frees both, in that order."""

    def __init__(self, listener: socket.socket, guard: Guard) -> None:
        self.listener = listener
        self._guard = guard

    async def close(self) -> None:
        self.listener.close()
        await self._guard.close()


async def open_http_port(host: str, port: int, owner: bytes) -> HttpPort:
    """Listens; StartupError names the port if another cluster or another program has it."""
    guard = Guard(port, owner)
    await guard.hold()
    try:
        listener = _bind(host, port)
    except StartupError:
        await guard.close()
        raise
    listener.listen(1024)
    return HttpPort(listener, guard)


async def check_http_port(host: str, port: int, owner: bytes | None) -> None:
    """StartupError if `open_http_port` would fail here now. Takes nothing, disturbs nobody."""
    await Guard(port, owner or b"").check()
    _bind(host, port).close()  # bound, it gets no connections; only who listens does


class Guard:
    """The abstract socket that says whose the port is."""

    def __init__(self, port: int, owner: bytes) -> None:
        self._port = port
        self._owner = owner
        self._server: asyncio.Server | None = None
        self._taking_over: asyncio.Task[None] | None = None

    async def check(self) -> bool:
        """Whether our own cluster holds it already; StartupError if another one does."""
        holder = await _ask_holder(self._port)
        if holder not in (None, self._owner):
            raise StartupError(
                f"HTTP port {self._port} belongs to another Tandem cluster on this host; "
                "choose another with --set http.port=..."
            )
        return holder is not None

    async def hold(self) -> None:
        """At once, or, where our own cluster holds it still, as soon as that ends."""
        for _ in range(TRIES):
            if await self._try():
                return
            if await self.check():
                self._taking_over = asyncio.create_task(self._take_over())
                return
            await asyncio.sleep(RETRY_S)
        raise StartupError(f"HTTP port {self._port}: its guard is held, but nobody answers there")

    async def close(self) -> None:
        if self._taking_over is not None:
            self._taking_over.cancel()
            await asyncio.gather(self._taking_over, return_exceptions=True)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _take_over(self) -> None:
        while not await self._try():
            await asyncio.sleep(RETRY_S)

    async def _try(self) -> bool:
        guard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            guard.bind(_name(self._port))
        except OSError as error:
            guard.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        self._server = await asyncio.start_unix_server(self._answer, sock=guard)
        return True

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._owner)
        with suppress(OSError):
            await writer.drain()
        writer.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.setblocking(False)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise StartupError(
            f"cannot listen on HTTP port {host}:{port}: {error.strerror}; "
            "choose another with --set http.port=..."
        ) from error
    return bound


def _name(port: int) -> str:
    return f"\0tandem-http-{port}"


async def _ask_holder(port: int) -> bytes | None:
    """The fingerprint of the guard's holder; None if nobody holds it."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            # by hand, because uvloop, which Serve's replicas run on, takes no abstract names
            await loop.sock_connect(asking, _name(port))
            return await asyncio.wait_for(loop.sock_recv(asking, 64), ANSWER_S)
        except TimeoutError:
            return b"somebody who does not answer"
        except OSError:
            return None
