"""How a connection ends, who hears of it and when; and one connection to each peer."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from cluster.errors import (
    WorkerLost,
)
from cluster.messages import (
    Address,
    Hello,
    OpenPush,
    Unpacked,
    Watch,
    WireMessage,
)
from cluster.wire import Stream, connect, serve
from tests.cluster.fakes import AT_ONCE_S, endpoint, identity, until
from tests.cluster.sockets import (
    WIRE,
    at,
    connected,
    echo,
    peers_of,
    serving,
)
from tests.cluster.strictness import STRICT

pytestmark = STRICT


async def test_a_closed_connection_is_lost_on_every_stream_at_once() -> None:
    async with serving() as server:
        connection = await connect(server.address, identity("caller"), WIRE, label="decode-3/1")
        streams = [await connection.open(Unpacked(seq=number)) for number in range(3)]
        for stream in streams:
            await stream.receive()
        waiting = [asyncio.create_task(stream.receive()) for stream in streams]
        await asyncio.sleep(0)
        async with asyncio.timeout(AT_ONCE_S):
            await server.close()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            await connection.wait_lost()
        assert all(isinstance(result, WorkerLost) for result in results)
        assert all("decode-3/1" in str(result) for result in results)
        with pytest.raises(WorkerLost):
            await streams[0].send(Watch())
        with pytest.raises(WorkerLost):
            await connection.open(Watch())


async def test_what_came_before_the_loss_is_still_read() -> None:
    async with serving() as server:
        connection = await connect(server.address, identity("caller"), WIRE)
        stream = await connection.open(Unpacked(seq=1))
        await until(lambda: stream._messages)
        await server.close()
        await connection.wait_lost()
        assert await stream.receive() == Unpacked(seq=1)
        with pytest.raises(WorkerLost):
            await stream.receive()


async def test_a_silent_peer_is_lost_within_t_detect() -> None:
    """Its socket stays open; it only says nothing more, as a stopped process does."""
    config = WIRE.model_copy(update={"heartbeat_s": 0.02, "t_detect_s": 0.1})
    loop = asyncio.get_running_loop()
    async with connected(config=config) as connection:
        stream = await connection.open(Watch())
        assert await stream.receive() == Watch()
        connection._transport.pause_reading()
        since = connection._heard_at
        with pytest.raises(WorkerLost, match="said nothing"):
            await stream.receive()
        assert 0.1 <= loop.time() - since < 0.1 + AT_ONCE_S


SERVE_FOREVER = """
import asyncio
from cluster.wire import serve
from tests.cluster.fakes import identity
from tests.cluster.sockets import WIRE, echo

async def main():
    server = await serve(echo, identity("decode"), WIRE)
    print(server.address.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_stopped_process_is_lost_in_time_and_a_killed_one_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE_FOREVER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = int(await asyncio.to_thread(process.stdout.readline))
        address = Address(host="127.0.0.1", port=port)
        config = WIRE.model_copy(update={"t_detect_s": 0.3})
        async with asyncio.timeout(0.6):
            connection = await connect(address, identity("caller"), config)
            process.send_signal(signal.SIGSTOP)
            await connection.wait_lost()
        process.send_signal(signal.SIGCONT)
        connection = await connect(address, identity("caller"), WIRE)
        stream = await connection.open(Watch())
        assert await stream.receive() == Watch()
        process.kill()
        with pytest.raises(WorkerLost):
            async with asyncio.timeout(AT_ONCE_S):
                await stream.receive()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_an_idle_connection_lives() -> None:
    """Heartbeats go both ways, so neither side gives the other up."""
    config = WIRE.model_copy(update={"heartbeat_s": 0.02, "t_detect_s": 0.1})
    async with connected(config=config) as connection:
        begun = connection._heard_at
        await until(lambda: connection._heard_at > begun + 0.3)
        assert not connection.lost


async def test_our_own_pause_is_not_the_peers_silence() -> None:
    """A loop that was held up for longer than t_detect hears what came meanwhile."""
    config = WIRE.model_copy(update={"heartbeat_s": 0.02, "t_detect_s": 0.1})
    async with connected(config=config) as connection:
        stream = await connection.open(Watch())
        assert await stream.receive() == Watch()
        connection._heard_at -= 10.0  # ten seconds in which neither timers nor sockets were served
        connection._ticked_at -= 10.0
        connection._tick()
        assert not connection.lost
        await stream.send(Unpacked(seq=1))
        assert await stream.receive() == Unpacked(seq=1)


async def test_closing_the_server_cancels_handlers_and_waits_for_them() -> None:
    ended: list[str] = []

    async def linger(stream: Stream, first: WireMessage, peer: Hello) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cancelled")

    async with serving(linger) as server:
        connection = await connect(server.address, identity("caller"), WIRE)
        streams = [await connection.open(Watch()) for _ in range(3)]
        await until(lambda: len(server._tasks) == 3)
        await server.close()
        assert ended == ["cancelled"] * 3
        for stream in streams:
            with pytest.raises(WorkerLost):
                await stream.receive()
        await connection.wait_lost()


async def test_streams_to_one_peer_share_one_connection() -> None:
    async with serving() as server, peers_of() as peers:
        there = endpoint().model_copy(update=at(server))
        streams = await asyncio.gather(
            *(peers.open(there, OpenPush(reservation=str(n), length=n)) for n in range(10))
        )
        for number, stream in enumerate(streams):
            assert await stream.receive() == OpenPush(reservation=str(number), length=number)
        assert len(server._connections) == 1


async def test_a_lost_peer_is_forgotten_and_its_next_life_is_another_peer() -> None:
    async with peers_of() as peers:
        async with serving() as server:
            first = endpoint().model_copy(update=at(server))
            stream = await peers.open(first, Watch())
            assert await stream.receive() == Watch()
        with pytest.raises(WorkerLost):
            await stream.receive()
        with pytest.raises(WorkerLost, match="decode-0/0"):
            await peers.open(first, Watch())

        again = await serve(echo, identity("decode"), WIRE, port=first.address.port)
        with pytest.raises(WorkerLost, match="another process has its address"):
            await peers.open(first, Watch())
        second = first.model_copy(update=at(again))
        stream = await peers.open(second, Watch())
        assert await stream.receive() == Watch()
        await again.close()
        await until(lambda: not peers._connections)


async def test_one_who_gives_up_connecting_does_not_disturb_others() -> None:
    async with serving() as server, peers_of() as peers:
        there = endpoint().model_copy(update=at(server))
        impatient = asyncio.create_task(peers.open(there, Watch()))
        patient = asyncio.create_task(peers.open(there, Unpacked(seq=1)))
        await asyncio.sleep(0)
        impatient.cancel()
        stream = await patient
        assert await stream.receive() == Unpacked(seq=1)
        assert impatient.cancelled()
