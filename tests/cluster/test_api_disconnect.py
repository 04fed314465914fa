"""A client that goes away, and a stream that comes as it is made: over a real uvicorn."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cluster.api.request_body import ClientGone
from cluster.api.streaming import while_connected
from cluster.config import ClusterConfig
from tests.cluster.fake_engine import CONFIG, TOKENIZER, FakeEngine, serving, with_http

WITHIN_S = 0.5  # what the product promises; here it takes milliseconds
ANSWER = TOKENIZER.encode("one two three")


@asynccontextmanager
async def client_of(
    engine: FakeEngine, config: ClusterConfig = CONFIG
) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(engine, config) as url,
        httpx.AsyncClient(base_url=url, timeout=10.0, verify=False) as client,
    ):
        yield client


def body(*, stream: bool) -> dict[str, object]:
    return {"prompt": [1, 2, 3], "stream": stream, "return_token_ids": True}


async def test_tokens_are_sent_as_they_come() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: index == 1
    async with (
        client_of(engine) as client,
        client.stream("POST", "/v1/completions", json=body(stream=True)) as answer,
    ):
        lines = (line async for line in answer.aiter_lines() if line)
        first = json.loads((await anext(lines)).removeprefix("data: "))
        assert first["choices"][0]["token_ids"] == ANSWER[:1]
        assert not engine.left.is_set()  # the second token does not exist yet
        engine.go_on.set()
        assert [line async for line in lines][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token", [0, 2], ids=["before_the_first_token", "in_the_middle"])
async def test_a_client_that_leaves_ends_its_generation(stream: bool, token: int) -> None:
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: index == token
    async with client_of(engine) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=body(stream=stream)))
        await asyncio.wait_for(engine.begun.wait(), WITHIN_S)
        assert not engine.left.is_set()
        request.cancel()  # httpx closes the connection
        await asyncio.wait_for(engine.left.wait(), WITHIN_S)
        await asyncio.gather(request, return_exceptions=True)


async def test_a_place_is_free_again_after_a_client_left() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: not engine.go_on.is_set()
    async with client_of(engine) as client:
        held = [
            asyncio.create_task(client.post("/v1/completions", json=body(stream=False)))
            for _ in range(2)
        ]
        while len(engine.requests) < 2:
            await asyncio.sleep(0.005)
        refused = await client.post("/v1/completions", json=body(stream=False))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        held[0].cancel()
        await asyncio.wait_for(engine.left.wait(), WITHIN_S)
        engine.go_on.set()
        assert (await client.post("/v1/completions", json=body(stream=False))).status_code == 200
        assert (await held[1]).status_code == 200


async def test_work_that_is_done_is_returned_even_as_the_client_leaves() -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def done() -> int:
        return 7

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    assert await while_connected(receive, done()) == 7
    with pytest.raises(ClientGone):
        await while_connected(receive, never())


async def read_slowly(url: str, asked: dict[str, object]) -> tuple[asyncio.StreamReader, Any]:
    """A request on a socket that takes little in; the headers are read and nothing else."""
    content = json.dumps(asked).encode()
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.setblocking(False)
    host, port = url.removeprefix("http://").split(":")
    await asyncio.get_running_loop().sock_connect(small, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=small, limit=4096)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


LONG: dict[str, object] = {"prompt": [1], "stream": True, "max_tokens": 1000, "logprobs": 20}
MANY = list(range(97, 107)) * 100


async def test_a_slow_reader_slows_its_own_generation_and_gets_all_of_it() -> None:
    engine = FakeEngine(MANY)
    async with serving(engine, small_buffers=True) as url:
        reader, writer = await read_slowly(url, LONG)
        told = -1
        while told != engine.told:  # until it stands still
            told = engine.told
            await asyncio.sleep(0.05)
        assert told < len(MANY), "the whole answer went into buffers"
        rest = b""
        while b"[DONE]" not in rest[-64:]:
            rest += await reader.read(65536)
        assert engine.told == len(MANY)
        writer.close()


async def test_a_reader_that_stands_still_counts_as_gone() -> None:
    engine = FakeEngine(MANY)
    config = with_http(stall_timeout_s=0.1)
    async with serving(engine, config, small_buffers=True) as url:
        _, writer = await read_slowly(url, LONG)
        await asyncio.wait_for(engine.left.wait(), 2.0)
        assert engine.told < len(MANY)
        writer.close()
