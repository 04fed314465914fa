"""Who may listen on a port: its own cluster, twice if need be; nobody else's."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from cluster.errors import StartupError
from cluster.http_port import check_http_port, fingerprint, open_http_port

HOST = "127.0.0.1"
OURS, THEIRS = fingerprint(b"ours"), fingerprint(b"theirs")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


async def test_a_replica_and_its_successor_share_the_port() -> None:
    port = free_port()
    first = await open_http_port(HOST, port, OURS)
    second = await open_http_port(HOST, port, OURS)
    await first.close()
    async with asyncio.timeout(2.0):
        while await holder(port) != OURS:  # the successor takes the guard over
            await asyncio.sleep(0.01)
    await second.close()


async def test_another_cluster_is_told_the_port() -> None:
    port = free_port()
    ours = await open_http_port(HOST, port, OURS)
    with pytest.raises(StartupError, match=rf"{port} belongs to another Tandem cluster"):
        await open_http_port(HOST, port, THEIRS)
    await ours.close()
    theirs = await open_http_port(HOST, port, THEIRS)  # nothing is left of ours
    await theirs.close()


async def test_a_check_tells_the_same_without_taking_anything() -> None:
    port = free_port()
    await check_http_port(HOST, port, None)
    assert await holder(port) is None
    ours = await open_http_port(HOST, port, OURS)
    await check_http_port(HOST, port, OURS)
    for owner in (THEIRS, None):
        with pytest.raises(StartupError, match="another Tandem cluster"):
            await check_http_port(HOST, port, owner)
    await ours.close()


def test_the_event_loop_of_serves_replicas_makes_no_difference() -> None:
    async def meet() -> None:
        port = free_port()
        ours = await open_http_port(HOST, port, OURS)
        with pytest.raises(StartupError, match="another Tandem cluster"):
            await open_http_port(HOST, port, THEIRS)
        await ours.close()

    uvloop.run(meet())


async def test_another_program_on_the_port_is_told() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on HTTP port {HOST}:{port}"):
            await open_http_port(HOST, port, OURS)
    opened = await open_http_port(HOST, port, OURS)  # and what failed has left no guard behind
    assert await holder(port) == OURS
    await opened.close()
    assert await holder(port) is None


async def holder(port: int) -> bytes | None:
    try:
        reader, writer = await asyncio.open_unix_connection(f"\0tandem-http-{port}")
    except OSError:
        return None
    try:
        return await reader.read(64)
    finally:
        writer.close()
