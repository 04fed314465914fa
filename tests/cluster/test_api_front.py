"""What every request passes: keys, ids, limits, counts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.api.api_keys import ApiKeys
from cluster.errors import StartupError, TransferError, Unauthorized
from cluster.metrics import Metrics
from tests.cluster.fake_engine import (
    CONFIG,
    TOKENIZER,
    FakeEngine,
    app_over,
    client_of,
    with_http,
)

ANSWER = TOKENIZER.encode("Hi!")
URL = "/v1/completions"


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst-key\n\n  second-key  \n")
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_with_keys_only_their_owners_get_answers(keys_file: str) -> None:
    engine = FakeEngine(ANSWER)
    app = app_over(engine, with_http(api_keys_file=keys_file))
    async with client_of(app) as client:
        for headers in ({}, bearer("wrong"), bearer(""), {"authorization": "Basic first-key"}):
            for answer in (
                await client.post(URL, json={"prompt": [1]}, headers=headers),
                await client.get("/v1/models", headers=headers),
                await client.get("/metrics", headers=headers),
                await client.get("/no/such/path", headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert not engine.requests
        for key in ("first-key", "second-key"):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200


def test_a_file_of_keys_that_cannot_be_used_is_no_open_server(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n\n")
    for path in (str(tmp_path / "none"), str(empty), str(tmp_path)):
        with pytest.raises(StartupError, match="api_keys_file"):
            ApiKeys.load(path)
    ApiKeys.load("").check("")
    with pytest.raises(Unauthorized):
        ApiKeys(("a",)).check("Bearer \udcff")


async def test_the_clients_request_id_comes_back_and_else_there_is_one() -> None:
    async with client_of(app_over(FakeEngine(ANSWER))) as client:
        bodies: list[dict[str, Any]] = [{"prompt": [1]}, {"prompt": [1], "stream": True}, {"n": 0}]
        for body in bodies:
            answer = await client.post(URL, json=body, headers={"x-request-id": "mine/7"})
            assert answer.headers.get_list("x-request-id") == ["mine/7"]
        first, second = [await client.get("/health") for _ in range(2)]
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        for wrong in ("a" * 129, "two words", "\u00e9"):
            answer = await client.get(
                "/health", headers=httpx.Headers({"x-request-id": wrong}, encoding="latin-1")
            )
            assert answer.status_code == 400
            assert "X-Request-Id" in answer.json()["error"]["message"]
            assert answer.headers["x-request-id"] != wrong


async def test_the_same_request_id_twice_at_once_is_two_requests() -> None:
    engine = FakeEngine(ANSWER)
    async with client_of(app_over(engine)) as client:
        headers = {"x-request-id": "same"}
        await asyncio.gather(
            *(client.post(URL, json={"prompt": [1]}, headers=headers) for _ in range(2))
        )
    first, second = engine.requests
    assert first.request_id != second.request_id


async def test_behind_a_proxys_prefix_the_same_paths_are_open(keys_file: str) -> None:
    app = app_over(FakeEngine(ANSWER), with_http(api_keys_file=keys_file))
    transport = httpx.ASGITransport(app, root_path="/tandem")
    async with httpx.AsyncClient(transport=transport, base_url="http://test/tandem") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers=bearer("first-key"))).status_code == 200


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def never() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    async with client_of(app_over(FakeEngine(ANSWER), with_http(body_timeout_s=0.05))) as client:
        answer = await client.post(URL, content=never())
    assert answer.status_code == 408
    assert answer.json()["error"]["type"] == "invalid_request_error"


def counts(text: str, name: str) -> dict[str, float]:
    """Value by label text."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name))
    return {labels.removeprefix(name): float(value) for labels, value in lines}


async def test_metrics_count_outcomes_and_nothing_that_a_client_chose(keys_file: str) -> None:
    engine = FakeEngine(ANSWER)
    async with client_of(app_over(engine)) as client:
        await client.post(URL, json={"prompt": [1, 2], "stream": True})
        await client.post(URL, json={"prompt": [1, 2], "n": 2})
        await client.post(URL, json={"prompt": []})
        await client.get("/v1/models/unknown-name")
        await client.get("/some/user/input")
        engine.error = TransferError("lost")
        await client.post(URL, json={"prompt": [1], "stream": True})
        await client.post(URL, json={"prompt": [1]})
        engine.roles = ()
        await client.get("/ready")
        told = await client.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain")
    assert counts(told.text, "tandem_http_requests_total") == {
        '{outcome="ok",path="/v1/completions"}': 2,
        '{outcome="bad_request",path="/v1/completions"}': 1,
        '{outcome="error",path="/v1/completions"}': 2,
        '{outcome="not_found",path="/v1/models"}': 1,
        '{outcome="not_found",path="other"}': 1,
        '{outcome="unavailable",path="/ready"}': 1,
    }
    assert counts(told.text, "tandem_answers_in_flight") == {"": 0}
    assert counts(told.text, "tandem_output_tokens_total") == {"": 5 * len(ANSWER)}
    assert counts(told.text, "tandem_prompt_tokens_total") == {"": 2 + 4 + 1 + 1}
    assert counts(told.text, "tandem_time_to_first_token_seconds_count") == {"": 5}
    assert counts(told.text, "tandem_time_per_output_token_seconds_count") == {"": 5}
    assert "user" not in told.text
    assert "unknown-name" not in told.text


def test_an_answers_times_are_measured_from_its_arrival() -> None:
    metrics = Metrics(lambda: 3)
    now = iter([10.0, 10.5, 11.0, 12.5])
    clock = metrics.answer(7, clock=lambda: next(now))
    for count in (2, 3, 6):
        clock.got(count)
    clock.end(6)
    text = metrics.text().decode()
    assert counts(text, "tandem_time_to_first_token_seconds_sum") == {"": 0.5}
    assert counts(text, "tandem_time_per_output_token_seconds_sum") == {"": 0.5}  # 2 s, 4 tokens
    assert counts(text, "tandem_answers_in_flight") == {"": 3}


async def test_the_openapi_document_names_every_field_and_route() -> None:
    async with client_of(app_over(FakeEngine())) as client:
        told = (await client.get("/openapi.json")).json()
        again = (await client.get("/openapi.json")).json()
    assert told == again
    fields = told["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "stop", "logit_bias", "timeline"} <= set(fields)
    assert "/v1/completions" in told["paths"]


async def test_a_bug_has_an_id_too_and_is_counted() -> None:
    class Broken(FakeEngine):
        def members(self) -> Any:
            raise KeyError("secret detail")

    async with client_of(app_over(Broken())) as client:
        answer: httpx.Response = await client.get("/ready")
        told = await client.get("/metrics")
    assert answer.status_code == 500
    assert answer.headers["x-request-id"]
    assert "secret" not in answer.text
    assert counts(told.text, "tandem_http_requests_total") == {'{outcome="error",path="/ready"}': 1}
    assert CONFIG.http.api_keys_file == ""
