"""OpenAI's own client against our server, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import openai
import pytest

from cluster.errors import NoRoom, TransferError, Unavailable
from tests.cluster.fake_engine import CONFIG, TOKENIZER, FakeEngine, serving, with_http

TEXT = "Hi \U0001fae0, there!"
ANSWER = TOKENIZER.encode(TEXT)
MODEL = CONFIG.model.served_name
WITHIN_S = 0.5


@asynccontextmanager
async def client_of(engine: FakeEngine, key: str = "any") -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(engine) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        ) as client,
    ):
        yield client


@contextmanager
def server_elsewhere(engine: FakeEngine) -> Iterator[str]:
    """A server in a thread of its own, for a client that blocks."""
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    urls: list[str] = []

    async def serve() -> None:
        async with serving(engine) as url:
            urls.append(url)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10.0)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def test_the_blocking_client_whole_and_streamed() -> None:
    with (
        server_elsewhere(FakeEngine(ANSWER)) as url,
        openai.OpenAI(
            base_url=f"{url}/v1", api_key="any", http_client=openai.DefaultHttpxClient(verify=False)
        ) as client,
    ):
        whole = client.completions.create(model=MODEL, prompt="Hello", max_tokens=64)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (TEXT, "length")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(ANSWER)
        stream = client.completions.create(model=MODEL, prompt="Hello", max_tokens=64, stream=True)
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
        assert chunks[-1].choices[0].finish_reason == "length"
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


async def test_the_async_client_with_everything_at_once() -> None:
    engine = FakeEngine(ANSWER)
    async with client_of(engine) as client:
        stream = await client.completions.create(
            model=MODEL,
            prompt=["Hello", "World"],
            max_tokens=64,
            temperature=0.5,
            seed=7,
            logprobs=2,
            stop=["there"],
            logit_bias={"5": 1},
            frequency_penalty=0.5,
            user="me",
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "min_p": 0.1},
        )
        texts, finishes, usages, spellings = ["", ""], ["", ""], [], ["", ""]
        async for chunk in stream:
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                finishes[choice.index] = choice.finish_reason or ""
                if choice.logprobs is not None:
                    assert choice.logprobs.tokens is not None
                    spellings[choice.index] += "".join(choice.logprobs.tokens)
    assert texts == [TEXT.partition("there")[0]] * 2
    assert finishes == ["stop", "stop"]
    assert len(usages) == 1
    assert all(told.startswith("Hi ") for told in spellings)
    assert engine.requests[0].sampling.top_k == 5


async def test_an_echo_with_logprobs_has_an_entry_for_each_token_of_prompt_and_answer() -> None:
    prompt = TOKENIZER.encode("The quick brown fox jumps over the lazy dog, and then some more.")[
        :20
    ]
    assert len(prompt) == 20
    async with client_of(FakeEngine([*ANSWER, *ANSWER], sizes=(7,))) as client:

        async def ask(**more: Any) -> Any:
            return await client.completions.create(
                model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=4, **more
            )

        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(
                model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=0
            )
        (whole,) = (await ask()).choices
        chunks = [chunk.choices[0] async for chunk in await ask(stream=True)]
    told = whole.logprobs.model_dump()
    assert {key: len(values) for key, values in told.items()} == dict.fromkeys(told, 24)
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert all(logprob < 0 for logprob in told["token_logprobs"][1:])
    assert told["text_offset"][0] == 0
    assert told["text_offset"][20] == len(TOKENIZER.decode(prompt))
    assert whole.text == TOKENIZER.decode(prompt) + TOKENIZER.decode(ANSWER[:4])
    assert "".join(chunk.text for chunk in chunks) == whole.text
    for key, values in told.items():
        assert [one for chunk in chunks for one in chunk.logprobs.model_dump()[key]] == values
    assert len(chunks) > 2  # the prompt comes as it is scored


async def test_errors_are_the_clients_own_kinds() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError, match="top_p") as wrong:
            await client.completions.create(model=MODEL, prompt="a", top_p=2)
        assert wrong.value.param == "top_p"
        with pytest.raises(openai.BadRequestError, match="no_such"):
            await client.completions.create(model=MODEL, prompt="a", extra_body={"no_such": 1})
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model=MODEL, prompt=[1] * 1_000, max_tokens=99_999)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="gpt", prompt="a")
        assert unknown.value.code == "model_not_found"
        engine.error = NoRoom("full", retry_after_s=3)
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(model=MODEL, prompt="a")
        assert full.value.response.headers["retry-after"] == "3"
        engine.error = Unavailable("nobody is there")
        with pytest.raises(openai.InternalServerError, match="nobody is there"):
            await client.completions.create(model=MODEL, prompt="a")


async def test_a_wrong_key_is_an_authentication_error(tmp_path: object) -> None:
    path = f"{tmp_path}/keys"
    with open(path, "w", encoding="utf-8") as keys:
        keys.write("right\n")
    async with serving(FakeEngine(ANSWER), with_http(api_keys_file=path)) as url:
        for key, expected in (("wrong", openai.AuthenticationError), ("right", None)):
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key=key,
                http_client=openai.DefaultAsyncHttpxClient(verify=False),
            ) as client:
                if expected is None:
                    await client.completions.create(model=MODEL, prompt="a")
                else:
                    with pytest.raises(expected):
                        await client.completions.create(model=MODEL, prompt="a")


async def test_an_error_in_mid_stream_is_raised_after_the_text_before_it() -> None:
    async with client_of(FakeEngine(ANSWER[:1], error=TransferError("state was lost"))) as client:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        got: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                got.append(chunk.choices[0].text)

        with pytest.raises(openai.APIError, match="state was lost"):
            await read()
        assert got == [TOKENIZER.decode(ANSWER[:1])]


async def test_leaving_a_stream_ends_its_generation() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold_at = lambda index: index == 2
    async with client_of(engine) as client:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.wait_for(engine.left.wait(), WITHIN_S)
