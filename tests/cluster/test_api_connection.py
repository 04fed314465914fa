"""Connections that are slow, too talkative or half closed: raw sockets against a real uvicorn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.api.http_connection import MOST_HEAD_BYTES
from tests.cluster.fake_engine import (
    TOKENIZER,
    WITHIN_S,
    FakeEngine,
    app_over,
    client_of,
    serving,
    with_http,
)

TEXT = "one two three"
ANSWER = TOKENIZER.encode(TEXT)
URL = "/v1/completions"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def request(version: str = "1.1", **body: object) -> bytes:
    content = json.dumps({"prompt": [1], **body}).encode()
    head = f"POST {URL} HTTP/{version}\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + content


async def everything(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), WITHIN_S)


async def test_a_head_that_comes_drop_by_drop_has_its_time() -> None:
    async with (
        serving(FakeEngine(ANSWER), with_http(head_timeout_s=0.15)) as url,
        connected(url) as (reader, writer),
    ):
        answer = asyncio.create_task(everything(reader))
        for drop in b"POST /v1/completions HTTP/1.1\r\nx-slow: " + b"a" * 10_000:
            writer.write(bytes([drop]))
            await asyncio.sleep(0.005)
            if answer.done():
                break
        told = await answer
    assert told.startswith(b"HTTP/1.1 408 ")
    assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "HeadTooSlow"


async def test_a_connection_that_says_nothing_and_a_slow_second_head_end_too() -> None:
    first = request().replace(b"connection: close", b"connection: keep-alive")
    async with serving(FakeEngine(ANSWER), with_http(head_timeout_s=0.15)) as url:
        async with connected(url) as (reader, _):
            assert (await everything(reader)).startswith(b"HTTP/1.1 408 ")
        async with connected(url) as (reader, writer):
            writer.write(first)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            writer.write(b"GET /health HT")
            assert b"HTTP/1.1 408 " in await everything(reader)


async def test_a_slow_answer_is_no_slow_head() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: index == 1
    async with (
        serving(engine, with_http(head_timeout_s=0.05)) as url,
        connected(url) as (reader, writer),
    ):
        writer.write(request())
        await engine.begun.wait()
        await asyncio.sleep(0.1)  # longer than a head may take: that time itself is the subject
        engine.go_on.set()
        assert (await everything(reader)).startswith(b"HTTP/1.1 200 ")


async def test_a_head_that_is_too_long_is_refused() -> None:
    async with serving(FakeEngine(ANSWER)) as url, connected(url) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\n" + b"x-more: yes\r\n" * (MOST_HEAD_BYTES // 12))
        assert (await everything(reader)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_only_stops_sending_gets_its_answer(stream: bool) -> None:
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: index == 0
    async with serving(engine) as url, connected(url) as (reader, writer):
        writer.write(request(stream=stream))
        writer.write_eof()
        await engine.begun.wait()
        for _ in range(2):  # both probes of the first tenth of a second
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        engine.go_on.set()
        told = await everything(reader)
    assert told.startswith(b"HTTP/1.1 200 ")
    if stream:
        assert told.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
    else:
        assert json.loads(told.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_more_can_come_from_it_so_the_connection_ends_with_the_answer(
    stream: bool,
) -> None:
    kept = request(stream=stream).replace(b"connection: close\r\n", b"")
    async with serving(FakeEngine(ANSWER)) as url, connected(url) as (reader, writer):
        writer.write(kept)
        writer.write_eof()
        assert b"HTTP/1.1 200 " in await everything(reader)  # to the end of the connection


async def test_a_body_whose_rest_can_never_come_ends_the_connection() -> None:
    async with serving(FakeEngine(ANSWER)) as url, connected(url) as (reader, writer):
        writer.write(request()[:-5])
        writer.write_eof()
        assert b" 200 " not in await everything(reader)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_stops_sending_and_then_leaves_is_noticed(stream: bool) -> None:
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: index == 0
    async with serving(engine) as url, connected(url) as (_, writer):
        writer.write(request(stream=stream))
        writer.write_eof()
        await engine.begun.wait()
        assert not engine.left.is_set()
        writer.close()
        await asyncio.wait_for(engine.left.wait(), WITHIN_S)


async def test_of_an_old_client_the_end_of_sending_is_its_leaving() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: index == 0
    async with serving(engine) as url, connected(url) as (_, writer):
        writer.write(request("1.0"))
        await engine.begun.wait()
        writer.write_eof()
        await asyncio.wait_for(engine.left.wait(), WITHIN_S)


async def test_a_body_that_says_it_is_no_json_is_refused() -> None:
    async with client_of(app_over(FakeEngine(ANSWER))) as client:
        for declared, status in (
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("", 415),
            ("application/json", 200),
            ("Application/JSON; charset=utf-8", 200),
        ):
            answer = await client.post(
                URL, content=b'{"prompt": [1]}', headers={"content-type": declared}
            )
            assert answer.status_code == status, declared
        assert (await client.post(URL, content=b'{"prompt": [1]}')).status_code == 200


async def test_a_wrong_method_has_our_error_shape_and_says_which_is_right() -> None:
    async with client_of(app_over(FakeEngine())) as client:
        for method, path, allowed in (
            ("GET", URL, "POST"),
            ("DELETE", URL, "POST"),
            ("POST", "/v1/models", "GET"),
            ("PUT", "/metrics", "GET"),
        ):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("MethodNotAllowed", "invalid_request_error")
