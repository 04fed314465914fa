"""Several answers, several prompts, echo, log-probabilities, stop strings: streamed and whole."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.logprobs import spell
from cluster.errors import WorkerLost
from cluster.messages import Request, unpack_ids
from cluster.seeds import choice_seed
from tests.cluster.fake_engine import (
    TOKENIZER,
    FakeEngine,
    app_over,
    client_of,
    with_http,
)

TEXT = "one, two, \U0001fae0 three, four"
ANSWER = TOKENIZER.encode(TEXT)
WIDE = with_http(max_concurrent=16)


async def ask(engine: FakeEngine, **body: Any) -> dict[str, Any]:
    """The whole answer, after both ways of asking for it have agreed."""
    body = {"prompt": "Hello", "max_tokens": 64, **body}
    async with client_of(app_over(engine, WIDE)) as client:
        whole = await client.post("/v1/completions", json=body)
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.post("/v1/completions", json=asked)
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text
    answer: dict[str, Any] = whole.json()
    *chunks, usage, done = stream.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    told = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    last = json.loads(usage.removeprefix("data: "))
    assert [chunk["usage"] for chunk in told] == [None] * len(told)
    assert last["choices"] == []
    assert last["usage"] == answer["usage"]
    assert joined(told, len(answer["choices"])) == answer["choices"]
    return answer


def joined(chunks: list[dict[str, Any]], choices: int) -> list[dict[str, Any]]:
    """The choices of a stream, put together as a client would."""
    answers: list[dict[str, Any]] = [
        {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        for index in range(choices)
    ]
    for chunk in chunks:
        for choice in chunk["choices"]:
            answer = answers[choice["index"]]
            assert answer["finish_reason"] is None, "something came after the end"
            answer["text"] += choice["text"]
            answer["finish_reason"] = choice["finish_reason"]
            if "token_ids" in choice:
                answer["token_ids"] = answer.get("token_ids", []) + choice["token_ids"]
            if choice["logprobs"] is not None:
                answer["logprobs"] = answer["logprobs"] or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    answer["logprobs"][key] += values
    return answers


@settings(max_examples=20, deadline=None)
@given(
    start=st.integers(0, len(TEXT) - 1),
    length=st.integers(1, 8),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    tells=st.sampled_from([{}, {"logprobs": 2}, {"return_token_ids": True}]),
    more=st.sampled_from([{}, {"echo": True}, {"include_stop_str_in_output": True}]),
)
async def test_streamed_and_whole_agree_for_any_stop_string_and_grouping(
    start: int, length: int, sizes: list[int], tells: dict[str, Any], more: dict[str, Any]
) -> None:
    stop = TEXT[start : start + length]
    body = {"stop": [stop, "never"], **tells, **more}
    answer = await ask(FakeEngine(ANSWER, sizes=sizes), **body)
    alone = await ask(FakeEngine(ANSWER), **body)
    assert answer["choices"] == alone["choices"]
    assert answer["usage"] == alone["usage"]
    (choice,) = answer["choices"]
    end = TEXT.index(stop) + (len(stop) if "include_stop_str_in_output" in more else 0)
    assert choice["text"] == ("Hello" if "echo" in more else "") + TEXT[:end]
    assert choice["finish_reason"] == "stop"


async def test_a_stop_string_ends_the_generation_and_not_only_its_text() -> None:
    engine = FakeEngine(ANSWER)
    answer = await ask(engine, stop=",")
    used = next(n for n in range(1, 99) if "," in TOKENIZER.decode(ANSWER[:n]))
    assert answer["usage"]["completion_tokens"] == used
    assert engine.told == 2 * used  # asked whole and streamed
    assert engine.stopped == [used, used]  # its ranks hear that it ended, and where
    assert engine.left.is_set()


async def test_min_tokens_puts_stop_strings_off() -> None:
    answer = await ask(FakeEngine(ANSWER), stop=",", min_tokens=len(ANSWER) - 1)
    assert answer["choices"][0]["text"] == TEXT
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_every_prompt_gets_n_answers_in_order() -> None:
    engine = FakeEngine()
    engine.answer_to = lambda request: [*unpack_ids(request.prompt), *ANSWER[:2]]
    answer = await ask(
        engine, prompt=[[1500], [1501, 1502]], n=2, seed=5, return_token_ids=True, echo=True
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        [1500, *ANSWER[:2]],
        [1500, *ANSWER[:2]],
        [1501, 1502, *ANSWER[:2]],
        [1501, 1502, *ANSWER[:2]],
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 14, "total_tokens": 17}
    whole = engine.requests[:4]
    assert [request.sampling.seed for request in whole] == [5, choice_seed(5, 1)] * 2
    assert len({request.request_id for request in engine.requests}) == 8


async def test_a_list_of_texts_is_a_batch() -> None:
    engine = FakeEngine(ANSWER)
    answer = await ask(engine, prompt=["a", "bc"], echo=True)
    assert [choice["text"] for choice in answer["choices"]] == ["a" + TEXT, "bc" + TEXT]


async def test_a_missing_seed_is_drawn_for_each_prompt() -> None:
    engine = FakeEngine(ANSWER)
    await ask(engine, prompt=["a", "a"], n=2)
    seeds = [request.sampling.seed for request in engine.requests]
    assert len(set(seeds)) == 8
    assert seeds[1] == choice_seed(seeds[0], 1)


def test_derived_seeds_stay_as_documented() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(7, 1) == 7768823104508221553
    assert len({choice_seed(seed, index) for seed in range(20) for index in range(20)}) == 400
    assert all(0 <= choice_seed(2**63 - 1, index) < 2**63 for index in range(100))


async def test_logprobs_of_every_token_the_first_included() -> None:
    answer = await ask(FakeEngine(ANSWER), logprobs=5, max_tokens=4)
    told = answer["choices"][0]["logprobs"]
    assert [len(values) for values in told.values()] == [4] * 4
    assert told["token_logprobs"] == [-1.0 - token for token in ANSWER[:4]]
    assert [len(top) for top in told["top_logprobs"]] == [6] * 4  # and the token itself
    assert told["text_offset"][0] == 0


async def test_an_echo_with_logprobs_spells_prompt_and_answer_alike() -> None:
    engine = FakeEngine(ANSWER, sizes=(3, 1))
    prompt = "Say \U0001fae0 twice"
    answer = await ask(engine, prompt=[prompt, "a"], n=2, echo=True, logprobs=2, max_tokens=6)
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        asked = prompt if choice["index"] < 2 else "a"
        ids, told = TOKENIZER.encode(asked), choice["logprobs"]
        assert choice["text"] == asked + TOKENIZER.decode(ANSWER[:6])
        assert [len(values) for values in told.values()] == [len(ids) + 6] * 4
        assert told["tokens"] == [spell(one, TOKENIZER) for one in [*ids, *ANSWER[:6]]]
        expected = [-1.0 - token for token in [*ids, *ANSWER[:6]]]
        assert told["token_logprobs"] == [None, *expected[1:]]
        assert told["top_logprobs"][0] is None
        assert [len(top) for top in told["top_logprobs"][1:]] == [3] * (len(ids) + 5)
        assert told["text_offset"][0] == 0
        assert told["text_offset"][len(ids)] == len(asked)
        plain = zip(told["tokens"], told["text_offset"], strict=True)
        assert all(choice["text"].startswith(token, at) for token, at in plain if ":" not in token)
    assert all(request.sampling.prompt_logprobs == 2 for request in engine.requests)


async def test_the_ids_beside_an_echo_are_the_answers_with_logprobs_and_without() -> None:
    for more in ({}, {"logprobs": 0}):
        answer = await ask(
            FakeEngine(ANSWER), echo=True, return_token_ids=True, max_tokens=3, **more
        )
        assert answer["choices"][0]["token_ids"] == list(ANSWER[:3])
    assert [len(top or {}) for top in answer["choices"][0]["logprobs"]["top_logprobs"][1:]] == (
        [1] * (len(TOKENIZER.encode("Hello")) + 2)
    )


async def test_what_the_model_rules_out_of_a_prompt_is_a_number_in_json() -> None:
    engine = FakeEngine(ANSWER)
    engine.ruled_out = 1501
    answer = await ask(engine, prompt=[1500, 1501, 1502], echo=True, logprobs=1, max_tokens=1)
    assert answer["choices"][0]["logprobs"]["token_logprobs"][1] == -9999.0


@pytest.mark.parametrize("stream", [False, True])
async def test_one_lost_answer_of_several_is_one_error_and_ends_the_others(stream: bool) -> None:
    engine = FakeEngine(ANSWER, error=WorkerLost("decode-1 died"))
    arrivals = count()
    engine.hold_at = lambda index: index == 4 and next(arrivals) < 2  # only the third goes on
    body = {"prompt": "a", "n": 3, "stream": stream}
    app = app_over(engine, WIDE)
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=body)
    if stream:
        assert answer.text.count("decode-1 died") == 1
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 502
    assert app.state.completions.running == 0


@pytest.mark.parametrize("colocated", [False, True])
async def test_one_rank_does_it_all_on_demand(colocated: bool) -> None:
    engine = FakeEngine(ANSWER)
    await ask(engine, colocated=colocated)
    assert engine.colocated == [colocated] * 2


async def test_all_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine(ANSWER)
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "logprobs": 3,
    }
    more = {
        "logit_bias": {"5": 1, "6": -100},
        "allowed_token_ids": [5, 6],
        "stop_token_ids": [7],
        "bad_words": ["two"],
        "user": "somebody",
        "best_of": 1,
    }
    await ask(engine, **fields, **more)
    request: Request = engine.requests[0]
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.logit_bias == ((5, 1.0), (6, -100.0))
    assert (sampling.allowed_token_ids, sampling.stop_token_ids) == ((5, 6), (7,))
    assert {TOKENIZER.decode(word) for word in sampling.bad_words} == {"two", " two"}
