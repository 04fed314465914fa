"""Servers and peers for the tests of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from cluster import frame
from cluster.config import WireSection
from cluster.messages import (
    Address,
    Hello,
    RejectedNow,
    WireMessage,
)
from cluster.wire import Connection, Handler, Peers, Server, Stream, connect, serve
from tests.cluster.fakes import identity

WIRE = WireSection(
    heartbeat_s=0.05,
    t_detect_s=1.0,
    connect_timeout_s=2.0,
    max_frame_bytes=4 << 20,
    cut_bytes=64 << 10,
)
BIG = RejectedNow(why="x" * (2 << 20))  # cut into 33 pieces


async def echo(stream: Stream, first: WireMessage, peer: Hello) -> None:
    message: WireMessage | None = first
    while message is not None:
        await stream.send(message)
        message = await stream.receive()


@asynccontextmanager
async def serving(handler: Handler = echo, config: WireSection = WIRE) -> AsyncIterator[Server]:
    server = await serve(handler, identity("decode"), config)
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def connected(
    handler: Handler = echo, config: WireSection = WIRE
) -> AsyncIterator[Connection]:
    async with serving(handler, config) as server:
        connection = await connect(server.address, identity("caller"), config)
        try:
            yield connection
        finally:
            await connection.close()


@asynccontextmanager
async def listening(
    speak: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Address]:
    """A plain socket, for those who do not play by the rules."""
    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    try:
        yield Address(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await server.wait_closed()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    header = await reader.readexactly(frame.HEADER_BYTES)
    return await reader.readexactly(int.from_bytes(header[:4], "big"))


def write_frame(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(frame.header(0, frame.DATA, len(body)) + body)


async def collect(stream: Stream) -> list[WireMessage]:
    return [message async for message in stream]


@asynccontextmanager
async def peers_of(role: str = "caller") -> AsyncIterator[Peers]:
    peers = Peers(identity(role), WIRE)
    try:
        yield peers
    finally:
        await peers.close()


def at(server: Server) -> dict[str, object]:
    return {"address": server.address, "incarnation": server._identity.incarnation}
