"""How streams share a connection: conversations, sizes, turns. Over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from cluster import frame
from cluster.errors import (
    BadRequest,
    ClusterError,
    NoRoom,
    ProtocolError,
    RequestCancelled,
    WorkerLost,
)
from cluster.messages import (
    Failed,
    Hello,
    RejectedNow,
    Tokens,
    Unpacked,
    Watch,
    WireMessage,
)
from cluster.wire import Connection, Server, Stream, connect
from tests.cluster.fakes import AT_ONCE_S, identity, until
from tests.cluster.sockets import (
    BIG,
    WIRE,
    collect,
    connected,
    echo,
    serving,
)
from tests.cluster.strictness import STRICT

pytestmark = STRICT


async def test_messages_arrive_in_order_on_every_stream() -> None:
    async with connected() as connection:

        async def converse(number: int) -> None:
            async with await connection.open(Unpacked(seq=number)) as stream:
                for index in range(50):
                    await stream.send(Tokens(first=index, token_ids=(number,)))
                assert await stream.receive() == Unpacked(seq=number)
                for index in range(50):
                    assert await stream.receive() == Tokens(first=index, token_ids=(number,))

        await asyncio.gather(*(converse(number) for number in range(20)))


async def test_the_end_of_the_handler_is_the_end_of_the_stream() -> None:
    async def once(stream: Stream, first: WireMessage, peer: Hello) -> None:
        await stream.send(first)

    async with connected(once) as connection:
        stream = await connection.open(Watch())
        assert await collect(stream) == [Watch()]
        assert await stream.receive() is None
        with pytest.raises(WorkerLost, match="ended the conversation"):
            await stream.send(Watch())


async def test_closing_a_stream_reaches_the_handler_at_once_and_ends_what_it_sends() -> None:
    heard: list[object] = []
    done = asyncio.Event()

    async def listen(stream: Stream, first: WireMessage, peer: Hello) -> None:
        heard.append(await stream.receive())
        try:
            await stream.send(Watch())
        except RequestCancelled as error:
            heard.append(error)
        done.set()

    async with connected(listen) as connection:
        async with await connection.open(Watch()):
            pass
        async with asyncio.timeout(AT_ONCE_S):
            await done.wait()
    assert heard[0] is None
    assert isinstance(heard[1], RequestCancelled)


@pytest.mark.parametrize("error", [NoRoom("full", retry_after_s=2.5), BadRequest("no")])
async def test_an_error_of_the_handler_is_the_last_message(error: ClusterError) -> None:
    async def fail(stream: Stream, first: WireMessage, peer: Hello) -> None:
        raise error

    async with connected(fail) as connection:
        expected = Failed(error=error.kind, message=str(error), retry_after_s=error.retry_after_s)
        assert await collect(await connection.open(Watch())) == [expected]


async def test_a_mistake_in_the_handler_is_logged_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(stream: Stream, first: WireMessage, peer: Hello) -> None:
        raise ZeroDivisionError("by zero")

    async with connected(fail) as connection:
        (failed,) = await collect(await connection.open(Watch()))
        assert isinstance(failed, Failed)
        assert failed.error == "ClusterError"
        assert "ZeroDivisionError: by zero" in failed.message
    assert "ZeroDivisionError" in caplog.text


async def test_garbage_on_one_stream_fails_that_stream_only() -> None:
    async with connected() as connection:
        healthy = await connection.open(Unpacked(seq=1))
        broken = await connection.open(Unpacked(seq=2))
        connection.put(broken.number, frame.DATA, b"\xc1garbage")
        assert await broken.receive() == Unpacked(seq=2)
        failed = await broken.receive()
        assert isinstance(failed, Failed)
        assert failed.error == "ProtocolError"
        await healthy.send(Watch())
        assert [await healthy.receive(), await healthy.receive()] == [Unpacked(seq=1), Watch()]


async def test_a_frame_of_no_known_kind_ends_the_connection() -> None:
    async with connected() as connection:
        stream = await connection.open(Watch())
        assert await stream.receive() == Watch()
        connection.put(stream.number, 99)
        with pytest.raises(WorkerLost):
            await stream.receive()


async def test_a_message_that_is_too_long_is_refused_by_its_sender() -> None:
    async with connected() as connection:
        stream = await connection.open(Watch())
        with pytest.raises(ProtocolError, match="max_frame_bytes"):
            await stream.send(RejectedNow(why="x" * WIRE.max_frame_bytes))
        with pytest.raises(ProtocolError, match="max_frame_bytes"):
            await connection.open(RejectedNow(why="x" * WIRE.max_frame_bytes))
        await stream.send(Unpacked(seq=1))
        assert [await stream.receive(), await stream.receive()] == [Watch(), Unpacked(seq=1)]


@pytest.mark.parametrize("in_pieces", [True, False], ids=["pieces", "one-frame"])
async def test_a_message_that_is_too_long_is_refused_by_its_receiver_and_harms_no_other(
    in_pieces: bool,
) -> None:
    """The sender believes in a larger limit, as a process with another configuration does."""
    lavish = WIRE.model_copy(
        update={
            "max_frame_bytes": 8 * WIRE.max_frame_bytes,
            "cut_bytes": WIRE.cut_bytes if in_pieces else 8 * WIRE.max_frame_bytes,
        }
    )
    async with serving() as server:
        connection = await connect(server.address, identity("caller"), lavish)
        healthy = await connection.open(Unpacked(seq=1))
        broken = await connection.open(Unpacked(seq=2))
        assert await broken.receive() == Unpacked(seq=2)
        with suppress(ProtocolError):  # it may be refused before the last piece has left
            await broken.send(RejectedNow(why="x" * (WIRE.max_frame_bytes + 1)))
        with pytest.raises(ProtocolError, match="refused"):
            await broken.receive()
        with pytest.raises(ProtocolError, match="refused"):
            await broken.send(Watch())
        await healthy.send(Watch())
        assert [await healthy.receive(), await healthy.receive()] == [Unpacked(seq=1), Watch()]
        await connection.close()


async def test_long_messages_come_whole() -> None:
    async with connected() as connection:
        stream = await connection.open(BIG)
        assert await stream.receive() == BIG
        longest = RejectedNow(why="x" * (WIRE.max_frame_bytes - 100))
        await stream.send(longest)
        assert await stream.receive() == longest


@asynccontextmanager
async def deaf(server: Server, connection: Connection) -> AsyncIterator[None]:
    """The server reads nothing from its sockets, until those who send have to wait."""
    (there,) = server._connections
    there._transport.pause_reading()
    filler = await connection.open(Watch())
    filling = asyncio.create_task(filler.send(RejectedNow(why="x" * (14 << 20))))
    await until(lambda: connection._full)
    try:
        yield
    finally:
        there._transport.resume_reading()
        await filling


async def test_a_small_message_does_not_wait_for_a_long_one() -> None:
    """All wait for a full socket; then the small one arrives before the long one that began."""
    arrived: list[str] = []

    async def note(stream: Stream, first: WireMessage, peer: Hello) -> None:
        async for message in stream:
            arrived.append(message.kind)

    config = WIRE.model_copy(update={"max_frame_bytes": 64 << 20})
    async with serving(note, config) as server:
        connection = await connect(server.address, identity("caller"), config)
        small = await connection.open(Watch())
        async with deaf(server, connection):
            sending = asyncio.create_task(small.send(Unpacked(seq=1)))
            await until(lambda: len(connection._turns) == 2)
        await sending
        await until(lambda: len(arrived) == 2)
        assert arrived == ["unpacked", "rejected"]
        await connection.close()


async def test_senders_wait_while_the_peer_does_not_read() -> None:
    """Nothing is piled up without limit on the sending side, and all of it arrives in the end."""
    received = 0

    async def count(stream: Stream, first: WireMessage, peer: Hello) -> None:
        nonlocal received
        async for _ in stream:
            received += 1

    config = WIRE.model_copy(update={"max_frame_bytes": 16 << 20})
    async with serving(count, config) as server:
        connection = await connect(server.address, identity("caller"), config)
        streams = [await connection.open(Watch()) for _ in range(10)]
        async with deaf(server, connection):
            sending = [asyncio.create_task(stream.send(BIG)) for stream in streams]
            await until(lambda: len(connection._turns) == 11)
            assert connection._transport.get_write_buffer_size() < 1 << 20
            assert not any(task.done() for task in sending)
        await asyncio.gather(*sending)
        await until(lambda: received == 11)
        await connection.close()


async def test_a_cancelled_sender_leaves_no_half_message_to_others() -> None:
    config = WIRE.model_copy(update={"max_frame_bytes": 16 << 20})
    async with serving(config=config) as server:
        connection = await connect(server.address, identity("caller"), config)
        victim = await connection.open(Unpacked(seq=1))
        other = await connection.open(Unpacked(seq=2))
        begun = asyncio.create_task(victim.send(RejectedNow(why="x" * (15 << 20))))
        await until(lambda: victim.sending.locked())
        async with deaf(server, connection):
            waiting = asyncio.create_task(other.send(BIG))
            await until(lambda: len(connection._turns) == 3)
            begun.cancel()
        await waiting
        assert [await other.receive(), await other.receive()] == [Unpacked(seq=2), BIG]
        with pytest.raises(ProtocolError, match="half sent"):
            await collect(victim)
        await connection.close()


async def test_a_stream_that_nobody_reads_is_broken_off_and_no_other() -> None:
    flooded = asyncio.Event()

    async def flood(stream: Stream, first: WireMessage, peer: Hello) -> None:
        if first == Watch():
            return await echo(stream, first, peer)
        with suppress(ProtocolError):
            while True:
                await stream.send(first)
                await asyncio.sleep(0)
        flooded.set()

    config = WIRE.model_copy(update={"queue_messages": 100})
    async with connected(flood, config) as connection:
        healthy = await connection.open(Watch())
        slow = await connection.open(Unpacked(seq=1))
        async with asyncio.timeout(5.0):
            await flooded.wait()
        with pytest.raises(ProtocolError, match="100 messages"):
            await slow.receive()
        assert await healthy.receive() == Watch()
        await healthy.send(Unpacked(seq=2))
        assert await healthy.receive() == Unpacked(seq=2)
