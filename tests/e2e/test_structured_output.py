"""Structured output on real ranks: one answer wherever it is made, and it follows its grammar.

Numbers are those of the catalogue of field cases.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.api.text import load_tokenizer
from cluster.errors import BadRequest
from cluster.generation import Timeline
from cluster.messages import Request
from cluster.request import Grammar
from engine.runner import Model
from tests.e2e.front import front_of
from tests.e2e.losing import PROMPT, Pausing, ask, lose_decode
from tests.e2e.random_grammars import follows, random_grammar
from tests.tiny import (
    MODEL,
    TinyCluster,
    load_tiny,
    make_prompt,
    make_request,
    tiny_config,
)

TOKENIZER = load_tokenizer(MODEL)
EOS = 1
MOST = 80  # tokens of an answer
ROOMY = {"num_blocks": 512, "num_slots": 32, "chunk_tokens": 64, "max_length": 512}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["read", "edit", "run"]},
        "line": {"type": "integer", "minimum": 0, "maximum": 9999},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["kind", "line", "flags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
GRAMMAR = Grammar(kind="json_schema", text=json.dumps(SCHEMA))


def structured(
    name: str, grammar: Grammar = GRAMMAR, prompt: Sequence[int] = PROMPT, **options: Any
) -> Request:
    options = {"max_tokens": MOST, "seed": 5} | options
    return make_request(prompt, name, ignore_stop=False, grammar=grammar, **options)


def text_of(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode([token for token in tokens if token != EOS])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_one_answer_on_two_ranks_on_one_and_after_a_loss(temperature: float) -> None:
    request = structured("r", temperature=temperature)
    async with TinyCluster() as cluster:
        expected = await ask(cluster, request)
    tokens = expected[0]
    assert follows(text_of(tokens), GRAMMAR)
    assert tokens[-1] == EOS
    async with TinyCluster(config=tiny_config(router={"colocated": True})) as cluster:
        assert await ask(cluster, request) == expected
        assert cluster.prefill[0].health().steps == 0
    for out in (1, len(tokens) // 2, len(tokens) - 1):
        model, timeline = Pausing(out), Timeline()
        async with TinyCluster(decode=2, model=model) as cluster:
            answer, _ = await asyncio.gather(
                ask(cluster, request, timeline), lose_decode(cluster, model, timeline)
            )
        assert answer == expected
        assert [event.name for event in timeline.events].count("lost") == 1


async def test_the_first_token_follows_too_and_may_be_the_whole_answer() -> None:
    async with TinyCluster() as cluster:
        digit = Grammar(kind="regex", text="[0-9]")
        (token,) = await cluster.answer(structured("one", digit, max_tokens=1))
        assert text_of([token]).isdigit()
        ends_at_once = Grammar(kind="regex", text="([0-9]{3})?")
        bias = {EOS: 100.0}
        (token,) = await cluster.answer(structured("none", ends_at_once, logit_bias=bias))
        assert token == EOS
        assert await cluster.settled()


async def test_fc38_many_at_once_all_parse() -> None:
    config = tiny_config(prefill={"engine": ROOMY}, decode={"engine": ROOMY})
    async with TinyCluster(config=config) as cluster:
        requests = [
            structured(f"r{n}", prompt=make_prompt(3, n), temperature=n % 2, seed=n)
            for n in range(30)
        ]
        answers = await asyncio.gather(*(cluster.answer(request) for request in requests))
        assert await cluster.settled()
    assert len(set(map(tuple, answers))) > 10
    for tokens in answers:
        assert tokens[-1] == EOS
        assert follows(text_of(tokens), GRAMMAR)


async def test_over_http_streamed_whole_and_from_python_are_one_answer() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "call", "schema": SCHEMA}}
    async with TinyCluster() as cluster, front_of(cluster) as front:
        told = await front.ask(
            prompt=PROMPT, ignore_eos=None, max_tokens=MOST, response_format=wanted
        )
    (choice,) = told["choices"]
    assert choice["finish_reason"] == "stop"
    assert follows(choice["text"], GRAMMAR)


async def test_fc36_a_rank_refuses_what_no_edge_has_seen_before_it_holds_anything() -> None:
    async with TinyCluster() as cluster:
        bad = [
            Grammar(kind="regex", text="["),
            Grammar(kind="regex", text="((a{999}){999}){999}"),
            Grammar(kind="json_schema", text='{"$ref": "#/nope"}'),
        ]
        for grammar in (*bad, *bad[::-1]):
            with pytest.raises(BadRequest, match="grammar"):
                await cluster.answer(structured("bad", grammar))
            assert cluster.all_free()
        assert cluster.prefill[0].health().steps == 0
        good = await cluster.answer(structured("good"))
        assert follows(text_of(good), GRAMMAR)


async def finished(model: Model, seeds: range) -> int:
    """How many of these grammars' answers came to an end; every one that did has followed."""
    config = tiny_config(prefill={"engine": ROOMY}, decode={"engine": ROOMY})
    done = 0
    async with TinyCluster(model=model, config=config) as cluster:
        at_once = asyncio.Semaphore(24)

        async def one(seed: int) -> None:
            nonlocal done
            grammar = random_grammar(seed)
            async with at_once:
                tokens = await cluster.answer(
                    structured(
                        f"r{seed}",
                        grammar,
                        make_prompt(3, seed),
                        temperature=float(seed % 3),
                        seed=seed,
                    )
                )
            if tokens[-1] == EOS:
                done += 1
                assert follows(text_of(tokens), grammar), (grammar.text, text_of(tokens))

        await asyncio.gather(*map(one, seeds))
        assert await cluster.settled()
    return done


async def test_answers_to_random_grammars_follow_them() -> None:
    assert await finished(load_tiny(), range(60)) > 45


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_answers_to_a_thousand_random_grammars_follow_them() -> None:
    assert await finished(load_tiny(), range(1000)) > 750


@pytest.mark.full
async def test_hostile_grammars_leave_the_neighbours_token_times_within_twice() -> None:
    """Median times between the tokens of one answer, without them and with them."""
    slow = [
        {"allOf": [{"pattern": f"(a|b)*{c}(a|b){{{n}}}$"} for n in range(3, 15)]} for c in "abcdef"
    ]
    hostile = [Grammar(kind="json_schema", text=json.dumps(schema)) for schema in slow]
    async with TinyCluster(model=load_tiny()) as cluster:

        async def median(name: str) -> float:
            gaps, last = [], time.monotonic()
            async for _ in cluster.deltas(make_request(make_prompt(20), name, max_tokens=80)):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
            return statistics.median(gaps)

        async def refused(grammar: Grammar) -> None:
            with pytest.raises(BadRequest):
                await cluster.answer(structured("bad", grammar))

        quiet = await median("quiet")
        busy = asyncio.create_task(median("busy"))
        await asyncio.gather(*map(refused, hostile))
        assert await busy < 2 * quiet
