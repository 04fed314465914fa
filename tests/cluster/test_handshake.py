"""Who may speak on a connection, and what a stranger gets to hear."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

import pytest

from cluster import frame
from cluster.codec import decode, encode
from cluster.errors import (
    ProtocolError,
    Unauthorized,
    WorkerLost,
)
from cluster.messages import (
    PROTOCOL_VERSION,
    Hello,
    Watch,
    WireMessage,
)
from cluster.wire import Identity, Stream, connect
from tests.cluster.fakes import SECRET, identity
from tests.cluster.sockets import (
    WIRE,
    collect,
    listening,
    read_frame,
    serving,
    write_frame,
)
from tests.cluster.strictness import STRICT

pytestmark = STRICT


async def test_both_sides_learn_who_the_other_is() -> None:
    peers: list[Hello] = []

    async def meet(stream: Stream, first: WireMessage, peer: Hello) -> None:
        peers.append(peer)

    me = identity("caller")
    async with serving(meet) as server:
        connection = await connect(server.address, me, WIRE)
        assert await collect(await connection.open(Watch())) == []
        assert connection.peer.role == "decode"
        assert [(peer.role, peer.incarnation) for peer in peers] == [("caller", me.incarnation)]
        await connection.close()


async def test_another_secret_is_refused_to_the_client_and_the_server_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server:
        stranger = replace(identity("caller"), secret=b"t" * 32)
        with pytest.raises(Unauthorized, match="secret"):
            await connect(server.address, stranger, WIRE)
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


async def test_a_server_without_the_secret_is_refused() -> None:
    """It cannot prove itself with the client's own proof, either."""
    sent_back = 0

    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_back
        await read_frame(reader)
        write_frame(writer, encode(identity("decode").hello()))
        write_frame(writer, await read_frame(reader))
        sent_back += 1
        await reader.read()
        writer.close()

    async with listening(mirror) as address:
        with pytest.raises(Unauthorized):
            await connect(address, identity("caller"), WIRE)
    assert sent_back


async def test_what_was_overheard_opens_no_door() -> None:
    """A proof is good for the nonces of its own connection only."""
    overheard: list[bytes] = []

    async with serving() as server:

        async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from_server, to_server = await asyncio.open_connection(
                server.address.host, server.address.port
            )
            for _ in range(2):
                overheard.append(await read_frame(reader))
                write_frame(to_server, overheard[-1])
                write_frame(writer, await read_frame(from_server))
            to_server.close()
            writer.close()

        async with listening(tap) as address:
            await (await connect(address, identity("caller"), WIRE)).close()

        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
        for body in overheard:
            write_frame(writer, body)
        assert isinstance(decode(await read_frame(reader)), Hello)
        assert await reader.read() == b"", "anything more than Hello would be a proof"
        writer.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        frame.header(0, frame.DATA, 1 << 20),
        frame.header(0, frame.DATA, 3) + b"abc",
        frame.header(1, frame.OPEN, 0),
        frame.header(0, frame.DATA, len(encode(Watch()))) + encode(Watch()),
        b"".join(frame.header(0, frame.MORE, 200) + bytes(200) for _ in range(10)),
    ],
    ids=["http", "huge", "garbage", "stream-before-proof", "no-hello", "endless"],
)
async def test_a_stranger_is_hung_up_on_and_told_nothing(greeting: bytes) -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
        writer.write(greeting)
        with suppress(ConnectionError):  # hung up on while the greeting was still on its way
            assert await reader.read() == b""
        writer.close()
        connection = await connect(server.address, identity("caller"), WIRE)
        await connection.close()


async def test_a_stranger_who_says_nothing_is_hung_up_on_in_time() -> None:
    config = WIRE.model_copy(update={"connect_timeout_s": 0.05})
    async with serving(config=config) as server:
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
        async with asyncio.timeout(1.0):
            assert await reader.read() == b""
        writer.close()


async def test_a_server_that_says_nothing_is_lost_in_time() -> None:
    hung_up = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        hung_up.set()

    config = WIRE.model_copy(update={"connect_timeout_s": 0.05})
    async with listening(mute) as address:
        with pytest.raises(WorkerLost, match=r"did not answer in 0\.05 s"):
            await connect(address, identity("caller"), config)
        await hung_up.wait()


async def test_an_address_where_nobody_listens_is_a_lost_worker() -> None:
    async with serving() as server:
        address = server.address
    with pytest.raises(WorkerLost, match="cannot be reached"):
        await connect(address, identity("caller"), WIRE)


async def test_another_protocol_version_is_named() -> None:
    class Older(Identity):
        def hello(self) -> Hello:
            return super().hello().model_copy(update={"version": 0})

    older = Older("caller", "i", SECRET)
    async with serving() as server:
        with pytest.raises(ProtocolError, match=f"protocol {PROTOCOL_VERSION}, this process 0"):
            await connect(server.address, older, WIRE)
