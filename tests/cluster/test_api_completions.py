"""The completions endpoint over a fake engine: bodies, chunks, refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cluster.api.app import create_app
from cluster.api.text import Tokenizer
from cluster.config import ClusterConfig
from cluster.errors import (
    ClusterError,
    NoRoom,
    RequestCancelled,
    TransferError,
    Unavailable,
    WorkerLost,
)
from cluster.messages import unpack_ids
from tests.cluster.fake_engine import (
    CONFIG,
    MODEL,
    TOKENIZER,
    FakeEngine,
    app_over,
    client_of,
    with_http,
)

TEXT = "Hi \U0001fae0!"
ANSWER = TOKENIZER.encode(TEXT)
URL = "/v1/completions"


async def post(
    engine: FakeEngine, body: dict[str, Any] | str, config: ClusterConfig = CONFIG
) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body)
    async with client_of(app_over(engine, config)) as client:
        return await client.post(URL, content=content)


def events(answer: httpx.Response) -> list[Any]:
    """The JSON of each event, and the word of the last."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    told = [line.removeprefix("data: ") for line in lines]
    return [word if word == "[DONE]" else json.loads(word) for word in told]


async def test_a_whole_answer() -> None:
    engine = FakeEngine(ANSWER)
    answer = await post(engine, {"prompt": "Hello", "max_tokens": len(ANSWER), "temperature": 0})
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["model"] == CONFIG.model.served_name
    assert body["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}
    ]
    prompt = TOKENIZER.encode("Hello")
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ANSWER),
        "total_tokens": len(prompt) + len(ANSWER),
    }
    (request,) = engine.requests
    assert body["id"] == request.request_id
    assert unpack_ids(request.prompt) == prompt
    assert (request.sampling.max_tokens, request.sampling.temperature) == (len(ANSWER), 0.0)


async def test_a_stream_joins_to_the_whole_answer() -> None:
    body = {
        "prompt": "Hello",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, usage, done = events(await post(FakeEngine(ANSWER), body))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ANSWER)


async def test_without_include_usage_the_finish_is_the_last_chunk() -> None:
    *_, last, done = events(await post(FakeEngine(ANSWER), {"prompt": "Hello", "stream": True}))
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == "length"
    assert "usage" not in last


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_and_the_timeline_on_demand(stream: bool) -> None:
    body = {"prompt": [1, 2], "stream": stream, "return_token_ids": True, "timeline": True}
    answer = await post(FakeEngine(ANSWER), body)
    if stream:
        *chunks, last, _ = events(answer)
        token_ids = [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]]
    else:
        last = answer.json()
        token_ids = last["choices"][0]["token_ids"]
    assert token_ids == ANSWER
    (event,) = last["timeline"]["events"]
    assert (event["event"], event["decode"]) == ("routed", "decode-a/0")
    assert len(last["timeline"]["token_times_s"]) == len(ANSWER)


async def test_sampling_reaches_the_engine_and_a_missing_seed_is_drawn() -> None:
    engine = FakeEngine(ANSWER)
    await post(engine, {"prompt": [5], "seed": 7, "temperature": 0.5, "stop_token_ids": [3]})
    await post(engine, {"prompt": [5]})
    await post(engine, {"prompt": [5], "seed": None, "ignore_eos": True})
    first, second, third = (request.sampling for request in engine.requests)
    assert (first.seed, first.temperature) == (7, 0.5)
    assert (first.stop_token_ids, first.ignore_stop, third.ignore_stop) == ((3,), False, True)
    assert second.temperature == 1.0
    assert second.seed != third.seed


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("abc", TOKENIZER.encode("abc")),
        (["abc"], TOKENIZER.encode("abc")),
        ([1, 2, 3], [1, 2, 3]),
        ([[1, 2, 3]], [1, 2, 3]),
    ],
)
async def test_one_prompt_in_any_spelling(prompt: object, token_ids: list[int]) -> None:
    engine = FakeEngine(ANSWER)
    assert (await post(engine, {"prompt": prompt})).status_code == 200
    (request,) = engine.requests
    assert unpack_ids(request.prompt) == token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [[-1]]),
        ("prompt", [[TOKENIZER.vocab_size]]),
        ("prompt", [[2**31]]),
        ("prompt", [2**70]),
        ("prompt", [[1]] * 1025),
        ("prompt", None),
        ("prompt", 3),
        ("prompt", [1, True]),
        ("prompt", ["a", 1]),
        ("prompt", {"a": 1}),
        ("prompt", "half a pair: \ud800"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "8"),
        ("max_tokens", 1.5),
        ("max_tokens", 2**40),
        ("temperature", -0.1),
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", 1e308),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("n", 0),
        ("n", 3),
        ("n", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_k", -2),
        ("top_k", 10**12),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("min_tokens", 17),
        ("logit_bias", {str(TOKENIZER.vocab_size): 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias.5", {"5": 1000}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [TOKENIZER.vocab_size]),
        ("bad_words.0", [""]),
        ("bad_words", ["a"] * 513),
        ("stop", [""]),
        ("stop", ""),
        ("stop", 1),
        ("stop", ["a", None]),
        ("stop", ["a" * 20_000]),
        ("logprobs", 21),
        ("logprobs", True),
        ("stream_options", {"include_usage": True}),
        ("stream", "yes"),
        ("stream_options.include_usage", {"include_usage": 1}),
        ("stop_token_ids", [TOKENIZER.vocab_size]),
        ("stop_token_ids.0", ["a"]),
        ("stop_token_ids", [1] * 1025),
        ("allowed_token_ids", [1] * 262_145),
        ("no_such_field", 1),
    ],
)
async def test_a_wrong_field_is_named(field: str, value: object) -> None:
    engine = FakeEngine(ANSWER)
    name = field.partition(".")[0]
    wide = with_http(max_body_bytes=1 << 20)
    answer = await post(engine, {"prompt": [1], name: value}, wide)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{field}: ")
    assert error["param"] == field
    assert not engine.requests


async def test_an_option_that_another_makes_void_is_refused() -> None:
    answer = await post(FakeEngine(), {"prompt": [1], "stop_token_ids": [3], "ignore_eos": True})
    assert answer.json()["error"]["param"] == "ignore_eos"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    answer = await post(FakeEngine(ANSWER), f'{{"prompt": [1], "temperature": {number}}}')
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", ["", "{", "[1]", '"a"', "\x00", "[" * 2000, '{"prompt": "\\ud800"}']
)
async def test_what_is_not_a_json_object_is_refused(body: str) -> None:
    answer = await post(FakeEngine(ANSWER), body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
async def test_padding_of_the_vocabulary_cannot_be_asked_for(field: str) -> None:
    tree = json.loads((MODEL / "tokenizer.json").read_text())
    padded = Tokenizer(tree, vocab_size=TOKENIZER.vocab_size + 7)
    padding = TOKENIZER.vocab_size + 3
    value = {str(padding): 100} if field == "logit_bias" else [padding]
    async with client_of(create_app(FakeEngine(ANSWER), padded, CONFIG)) as client:
        answer = await client.post(URL, json={"prompt": [1], field: value})
    assert answer.status_code == 400
    assert str(padding) in answer.json()["error"]["message"]


async def test_allowing_only_what_is_forbidden_is_refused() -> None:
    (token_id,) = TOKENIZER.encode("a")
    body = {"prompt": [1], "allowed_token_ids": [token_id], "bad_words": ["a"]}
    answer = await post(FakeEngine(ANSWER), body)
    assert answer.status_code == 400
    assert "allowed_token_ids" in answer.json()["error"]["message"]


async def test_too_long_is_refused_with_both_numbers_before_the_engine() -> None:
    engine = FakeEngine(ANSWER)
    limit = CONFIG.decode.engine.max_length
    fits = await post(engine, {"prompt": [1], "max_tokens": limit - 1})
    answer = await post(engine, {"prompt": [1], "max_tokens": limit})
    assert (fits.status_code, answer.status_code) == (200, 400)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert str(limit) in answer.json()["error"]["message"]
    assert len(engine.requests) == 1


async def test_a_body_over_the_limit_is_refused() -> None:
    answer = await post(FakeEngine(ANSWER), {"prompt": "a" * CONFIG.http.max_body_bytes})
    assert answer.status_code == 413
    assert str(CONFIG.http.max_body_bytes) in answer.json()["error"]["message"]


async def test_a_body_that_says_it_is_over_the_limit_is_not_waited_for() -> None:
    headers = {"content-length": str(10**30)}  # of a body that never comes whole
    async with client_of(app_over(FakeEngine(ANSWER))) as client:
        answer = await client.post(URL, content=b"{", headers=headers)
    assert answer.status_code == 413


async def test_another_model_is_not_found() -> None:
    answer = await post(FakeEngine(ANSWER), {"prompt": [1], "model": "gpt"})
    assert answer.status_code == 404
    assert CONFIG.model.served_name in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (NoRoom("full", retry_after_s=2.5), 429, "rate_limit_error", "3"),
        (Unavailable("no prefill"), 503, "server_error", "1"),
        (WorkerLost("decode-1 died"), 502, "server_error", None),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    stream: bool, error: ClusterError, status: int, kind: str, retry_after: str | None
) -> None:
    answer = await post(FakeEngine(error=error), {"prompt": [1], "stream": stream})
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == retry_after
    assert answer.json()["error"]["message"] == str(error)
    assert answer.json()["error"]["type"] == kind


async def test_an_error_in_mid_stream_is_the_last_event_and_no_finish_was_told() -> None:
    engine = FakeEngine(ANSWER[:2], error=TransferError("state was lost"))
    *chunks, last = events(await post(engine, {"prompt": [1], "stream": True}))
    assert last["error"]["message"] == "state was lost"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_a_server_that_ends_says_so_in_the_stream() -> None:
    engine = FakeEngine(ANSWER[:2], error=RequestCancelled("this caller was closed"))
    *_, last = events(await post(engine, {"prompt": [1], "stream": True}))
    assert last["error"]["message"] == "this caller was closed"


async def test_an_error_of_a_whole_answer_is_never_half_of_it() -> None:
    engine = FakeEngine(ANSWER[:2], error=TransferError("state was lost"))
    answer = await post(engine, {"prompt": [1]})
    assert answer.status_code == 502
    assert "choices" not in answer.json()


async def test_a_bug_is_a_500_without_its_inside() -> None:
    class Broken(FakeEngine):
        def generate(self, *_: object, **__: object) -> Any:  # type: ignore[override]
            raise KeyError("secret detail")

    answer = await post(Broken(), {"prompt": [1]})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


async def test_ready_needs_a_live_rank_of_each_pool_and_health_does_not() -> None:
    engine = FakeEngine()
    async with client_of(app_over(engine)) as client:
        assert (await client.get("/ready")).json()["ranks"] == {"prefill": 1, "decode": 1}
        engine.roles = ("decode",)
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert "prefill" in answer.json()["error"]["message"]
        assert "decode" not in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        assert (await client.get("/health")).status_code == 200


async def test_models_and_unknown_paths() -> None:
    name = CONFIG.model.served_name
    async with client_of(app_over(FakeEngine())) as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == [name]
        assert (await client.get(f"/v1/models/{name}")).json() == listed["data"][0]
        assert (await client.get("/v1/models/other")).status_code == 404
        unknown = await client.get("/v1/nothing")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "NoSuchRoute"
        assert (await client.get(URL)).status_code == 405
