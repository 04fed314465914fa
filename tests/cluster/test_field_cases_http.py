"""What went wrong in the field with HTTP itself, over a fake engine: the whole front, no ranks.

Numbers are those of the catalogue of field cases.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.client import build_request
from cluster.errors import BadRequest
from cluster.http_client import HttpClient, SyncHttpClient
from tests.cluster.fake_engine import (
    CONFIG,
    TOKENIZER,
    FakeEngine,
    app_over,
    client_of,
    serving,
    with_http,
)

URL = "/v1/completions"
ANSWER = TOKENIZER.encode("Hi \U0001fae0!")
V = TOKENIZER.vocab_size
WIDE = with_http(max_concurrent=16)


async def works(client: httpx.AsyncClient) -> bool:
    """Probe L: the next request is answered as if nothing had been."""
    answer = await client.post(URL, json={"prompt": "Hello", "max_tokens": 64})
    return bool(answer.json()["choices"][0]["text"] == TOKENIZER.decode(ANSWER))


# ------------------------------------------------------------------ FC-18

ODD_PROMPTS = ['""', '[""]', "[]", "[[]]", "[[-1]]", f"[[{V}]]", "[[2147483648]]", "null"]
MORE_ODD_PROMPTS = [
    *(
        "[-1]",
        f"[{V}]",
        "[2147483648]",
        "[1e99]",
        "[1.0]",
        "[null]",
        "[[null]]",
        '["a", ""]',
        '["a", [null]]',
    ),
    *("[[1], []]", '[["a"]]', "[[[1]]]", "{}", "7", "true", '"\\ud800"'),
]


@pytest.mark.parametrize("prompt", [*ODD_PROMPTS, *MORE_ODD_PROMPTS])
async def test_fc18_empty_and_odd_prompts_are_a_400_that_says_why(prompt: str) -> None:
    engine = FakeEngine(ANSWER)
    async with client_of(app_over(engine, WIDE)) as client:
        for more in ("", ', "stream": true', ', "n": 2', ', "echo": true, "logprobs": 1'):
            answer = await client.post(URL, content=f'{{"prompt": {prompt}{more}}}'.encode())
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["param"] == "prompt", error
        assert not engine.requests
        assert await works(client)


@pytest.mark.parametrize("prompt", ["", [], [-1], [V], [2**31], [[]], [[-1]], [None], None, [1.5]])
async def test_fc18_the_python_clients_refuse_the_same(prompt: Any) -> None:
    engine = FakeEngine(ANSWER)
    async with serving(engine) as url, HttpClient(url) as client:
        with pytest.raises(BadRequest, match="prompt"):
            await client.complete(prompt)
        with pytest.raises(BadRequest, match="prompt"):
            [chunk async for chunk in client.stream(prompt)]
        assert not engine.requests
        assert (await client.complete("a", max_tokens=64)).text == TOKENIZER.decode(ANSWER)


# ------------------------------------------------------------------ FC-26


async def test_fc26_a_text_that_nearly_ends_is_never_sent_and_taken_back() -> None:
    """What could be the beginning of a stop string waits, at most so long, and then goes."""
    text = "abcabcabd and so on"
    engine = FakeEngine(TOKENIZER.encode(text))
    for stop in ("abcabd", "abcabcabd", "on!", "and so on", "a", "x", text):
        async with client_of(app_over(engine)) as client:
            body = {"prompt": "p", "stream": True, "stop": [stop], "max_tokens": 64}
            told = (await client.post(URL, json=body)).text
        sent = ""
        for line in told.split("\n\n")[:-2]:
            sent += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            assert stop not in sent
            assert text.startswith(sent)
        assert sent == text.split(stop)[0]


# ------------------------------------------------------------------ FC-34


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1.0),
        ("temperature", 1e308),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 10**12),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 2**64),
    ],
)
async def test_fc34_every_python_client_refuses_what_http_refuses(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field):
        build_request([1, 2], **{field: value})

    def blocking(url: str) -> None:
        with SyncHttpClient(url) as client, pytest.raises(BadRequest, match=field):
            client.complete("a", **{field: value})

    engine = FakeEngine(ANSWER)
    async with serving(engine) as url, HttpClient(url) as client:
        with pytest.raises(BadRequest, match=field):
            await client.complete("a", **{field: value})
        with pytest.raises(BadRequest, match=field):
            [chunk async for chunk in client.stream("a", **{field: value})]
        await asyncio.to_thread(blocking, url)
    assert not engine.requests


# ------------------------------------------------------------------ FC-56


async def test_fc56_nothing_that_a_client_chose_is_a_label() -> None:
    async with client_of(app_over(FakeEngine(ANSWER), WIDE)) as client:

        async def series() -> int:
            text = (await client.get("/metrics")).text
            assert "chosen" not in text
            return sum(1 for line in text.splitlines() if line and not line.startswith("#"))

        kinds: list[Callable[[int], Any]] = [
            lambda n: client.post(URL, json={"prompt": [1], "model": f"chosen-{n}"}),
            lambda n: client.post(URL, json={"prompt": [1], "user": f"chosen-{n}"}),
            lambda n: client.post(
                URL, json={"prompt": [1], "stream": True}, headers={"x-request-id": f"chosen-{n}"}
            ),
            lambda n: client.get(f"/v1/chosen{n}"),
            lambda n: client.get(f"/v1/models/chosen{n}"),
            lambda n: client.request(f"CHOSEN{n}", URL),
        ]
        expected = (404, 200, 200, 404, 404, 405)
        assert await works(client)
        before = await series()
        for number in range(1000):
            kind = number % len(kinds)
            answer = await kinds[kind](number)
            assert answer.status_code == expected[kind], (number, answer.text)
        assert await series() - before <= 20
        assert CONFIG.model.served_name not in (await client.get("/metrics")).text
