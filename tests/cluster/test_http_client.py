"""Our own HTTP client, with an event loop and without one, against our own server."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest

from cluster.errors import (
    BadRequest,
    ClusterError,
    NoRoom,
    PromptTooLong,
    TransferError,
    Unauthorized,
    Unavailable,
    WorkerLost,
)
from cluster.http_client import HttpClient, SyncHttpClient
from tests.cluster.fake_engine import CONFIG, TOKENIZER, FakeEngine, serving, with_http

TEXT = "Hi \U0001fae0, there!"
ANSWER = TOKENIZER.encode(TEXT)
WITHIN_S = 0.5


async def test_an_answer_whole_and_streamed() -> None:
    async with serving(FakeEngine(ANSWER)) as url, HttpClient(url) as client:
        whole = await client.complete("Hello", max_tokens=64, n=2)
        assert (whole.text, whole.choices[1].index) == (TEXT, 1)
        assert whole.completion_tokens == 2 * len(ANSWER)
        chunks = [
            chunk async for chunk in client.stream([1, 2], max_tokens=64, return_token_ids=True)
        ]
        assert "".join(chunk.text for chunk in chunks) == TEXT
        assert [token for chunk in chunks for token in chunk.token_ids] == ANSWER
        assert chunks[-1].finish == "length"
        assert await client.ready()
        assert await client.models() == (CONFIG.model.served_name,)


async def test_the_same_without_an_event_loop() -> None:
    engine = FakeEngine(ANSWER)

    def blocking(url: str) -> None:
        with SyncHttpClient(url) as client:
            assert client.complete("Hello", max_tokens=64).text == TEXT
            chunks = list(client.stream("Hello", max_tokens=64))
            assert "".join(chunk.text for chunk in chunks) == TEXT
            assert client.ready()
            assert client.models() == (CONFIG.model.served_name,)
            with pytest.raises(BadRequest, match="top_p"):
                client.complete("Hello", top_p=7)
            engine.error = TransferError("lost")
            with pytest.raises(TransferError, match="lost"):
                list(client.stream("Hello"))

    async with serving(engine) as url:
        await asyncio.to_thread(blocking, url)


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_come_back_as_what_they_were(stream: bool) -> None:
    engine = FakeEngine()

    async def ask(client: HttpClient, prompt: Any, **fields: Any) -> None:
        if not stream:
            await client.complete(prompt, **fields)
            return
        async with aclosing(client.stream(prompt, **fields)) as chunks:
            async for _ in chunks:
                pass

    async with serving(engine) as url, HttpClient(url) as client:
        with pytest.raises(PromptTooLong):
            await ask(client, [1], max_tokens=99_999)
        with pytest.raises(BadRequest, match="nonsense: "):
            await ask(client, [1], nonsense=1)
        with pytest.raises(BadRequest, match="other"):
            await ask(client, [1], model="other")
        told: ClusterError
        for told in (Unavailable("nobody", retry_after_s=4), NoRoom("full", retry_after_s=4)):
            engine.error = told
            with pytest.raises(type(told), match=str(told)) as got:
                await ask(client, [1])
            assert got.value.retry_after_s == 4
        engine.error = TransferError("lost")
        with pytest.raises(TransferError, match="lost"):
            await ask(client, [1])


async def test_a_key_is_sent(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text("right")
    async with serving(FakeEngine(ANSWER), with_http(api_keys_file=str(path))) as url:
        async with HttpClient(url, "right") as client:
            assert (await client.complete("a", max_tokens=64)).text == TEXT
        async with HttpClient(url, "wrong") as client:
            with pytest.raises(Unauthorized):
                await client.complete("a")


async def test_leaving_a_stream_cancels_it() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: index == 2
    async with serving(engine) as url, HttpClient(url) as client:
        async for _ in client.stream("a"):
            break
        await asyncio.wait_for(engine.left.wait(), WITHIN_S)


async def test_a_server_that_is_not_there_or_falls_silent() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with HttpClient(f"http://127.0.0.1:{closed.getsockname()[1]}") as client:
            with pytest.raises(Unavailable, match="nobody answers"):
                await client.complete("a")
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: index == 2
    async with serving(engine) as url, HttpClient(url, silence_s=0.05) as client:
        with pytest.raises(WorkerLost, match="said nothing"):
            await client.complete("a")


async def test_a_stream_that_breaks_off_is_not_taken_for_an_answer() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        writer.write(
            b'data: {"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
        )
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, HttpClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(WorkerLost, match="before the answer did"):
            [chunk async for chunk in client.stream("a")]
    with pytest.raises(BadRequest, match=r"stream\(\)"):
        await HttpClient("http://x").complete("a", stream=True)
