"""The cluster's own sockets: connect, serve, and one connection to each peer.

    async with await peers.open(endpoint, Prefill(...)) as stream:
        async for message in stream: ...

Framed msgpack over TCP, mutually authenticated (handshake), bounded, multiplexed (connection),
cancelled by closing (stream). Knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress

from cluster.config import WireSection
from cluster.connection import Connection
from cluster.errors import ClusterError, RequestCancelled, Unauthorized, WorkerLost
from cluster.handshake import Identity, admit, introduce, new_incarnation
from cluster.messages import Address, Endpoint, Failed, Hello, WireMessage
from cluster.stream import Stream

__all__ = [
    "Connection",
    "Handler",
    "Identity",
    "Peers",
    "Server",
    "Stream",
    "connect",
    "new_incarnation",
    "serve",
]

logger = logging.getLogger(__name__)

Handler = Callable[[Stream, WireMessage, Hello], Awaitable[None]]
"""(stream, its first message, who opened it); the stream is closed when it returns."""


async def connect(
    address: Address, identity: Identity, config: WireSection, *, label: str | None = None
) -> Connection:
    """A connection on which both sides have proved the secret.

    WorkerLost when nobody answers in connect_timeout_s; Unauthorized for another secret;
    ProtocolError for another protocol version. `label` names the peer in error messages.
    """
    label = label or f"{address.host}:{address.port}"
    where = f"{label} at {address.host}:{address.port}"
    try:
        async with asyncio.timeout(config.connect_timeout_s):
            try:
                return await _connect(address, identity, config, label)
            except Unauthorized:
                # It hung up on our proof, as a process does that dies just then. Only one that
                # is there to do it again has really refused us.
                return await _connect(address, identity, config, label)
    except TimeoutError as error:
        raise WorkerLost(f"{where} did not answer in {config.connect_timeout_s:g} s") from error
    except OSError as error:
        raise WorkerLost(f"{where} cannot be reached: {error}") from error


async def _connect(
    address: Address, identity: Identity, config: WireSection, label: str
) -> Connection:
    connection = Connection(config, label=label)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: connection, address.host, address.port)
    try:
        connection.prove(await introduce(connection.greeting, identity))
    except BaseException:
        connection.abort()
        raise
    return connection


async def serve(
    handler: Handler,
    identity: Identity,
    config: WireSection,
    port: int = 0,
    host: str | None = None,
) -> Server:
    """Listen, and run `handler` for every stream that a proven peer opens. Port 0: any free one.

    A ClusterError that the handler raises is sent as Failed; so is any other, after it is logged.
    """
    server = Server(handler, identity, config)
    await server.listen(host or config.host, port)
    return server


class Server:
    """A listening socket with its connections and the handlers that run on them."""

    address: Address

    def __init__(self, handler: Handler, identity: Identity, config: WireSection) -> None:
        self._handler = handler
        self._identity = identity
        self._config = config
        self._closing = False
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, host, port)
        self.address = Address(host=host, port=self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, send what is written, hang up, cancel every handler.

        In this order, so that peers learn of a lost worker and not of ordered ends.
        """
        self._closing = True
        self._listener.close()
        await asyncio.gather(*(connection.close() for connection in list(self._connections)))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._listener.wait_closed()

    def _accept(self) -> Connection:
        return Connection(self._config, on_made=self._made, on_open=self._begin)

    def _made(self, connection: Connection) -> None:
        if self._closing:
            connection.abort()
            return
        self._connections.add(connection)
        connection.gone.add_done_callback(lambda _: self._connections.discard(connection))
        self._spawn(self._welcome(connection))

    async def _welcome(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                peer = await admit(connection.greeting, self._identity)
        except (ClusterError, TimeoutError) as error:
            logger.debug("hung up on a stranger: %s", error)
            await (
                connection.close()
            )  # not cut: our Hello tells one of another version what is wrong
            return
        connection.label = f"{peer.role} {peer.incarnation}"
        connection.prove(peer)  # before the peer can have read our proof, so before it goes on

    def _begin(self, connection: Connection, stream: Stream) -> None:
        self._spawn(self._converse(connection, stream))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, connection: Connection, stream: Stream) -> None:
        async with stream:
            try:
                first = await stream.receive()
                if first is not None:
                    await self._handler(stream, first, connection.peer)
            except ClusterError as error:
                await _tell(stream, error)
            except Exception as error:
                logger.exception("a conversation with %s failed", connection.label)
                role = self._identity.role
                await _tell(stream, ClusterError(f"{role} failed: {type(error).__name__}: {error}"))


async def _tell(stream: Stream, error: ClusterError) -> None:
    with suppress(ClusterError):  # the one who would hear it may be the one who has gone
        await stream.send(
            Failed(error=error.kind, message=str(error), retry_after_s=error.retry_after_s)
        )


class Peers:
    """One connection to each life of each peer: made when first wanted, dropped when lost."""

    def __init__(self, identity: Identity, config: WireSection) -> None:
        self._identity = identity
        self._config = config
        self._connections: dict[str, asyncio.Task[Connection]] = {}  # by incarnation
        self._closed = False

    async def open(self, endpoint: Endpoint, first: WireMessage) -> Stream:
        """A stream to exactly this life of the peer. Errors as of connect().

        RequestCancelled after close().
        """
        if self._closed:
            raise RequestCancelled(f"this process has left; it asks {endpoint.name} nothing more")
        connecting = self._connections.get(endpoint.incarnation)
        if connecting is None:
            connecting = asyncio.get_running_loop().create_task(self._connect(endpoint))
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._connections[endpoint.incarnation] = connecting
        connection = await asyncio.shield(connecting)  # others may wait for it too
        return await connection.open(first)

    async def close(self) -> None:
        """Hang up on everybody, for good."""
        self._closed = True
        tasks = list(self._connections.values())
        for task in tasks:
            task.cancel()
        made = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in made if isinstance(one, Connection)))

    async def _connect(self, endpoint: Endpoint) -> Connection:
        try:
            connection = await connect(
                endpoint.address, self._identity, self._config, label=endpoint.name
            )
            if connection.peer.incarnation != endpoint.incarnation:
                await connection.close()
                raise WorkerLost(f"{endpoint.name} is gone: another process has its address")
        except BaseException:
            self._drop(endpoint.incarnation)
            raise
        connection.gone.add_done_callback(lambda _: self._drop(endpoint.incarnation))
        return connection

    def _drop(self, incarnation: str) -> None:
        self._connections.pop(incarnation, None)
