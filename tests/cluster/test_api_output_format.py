"""What answers must look like, over HTTP: each spelling of it, and what is refused.

Numbers are those of the catalogue of field cases.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cluster.api.completion_body import parse_completion
from cluster.client import build_request
from cluster.errors import BadRequest
from cluster.grammars import Grammars
from cluster.http_client import HttpClient
from cluster.request import Grammar
from tests.cluster.fake_engine import MODEL, TOKENIZER, FakeEngine, app_over, client_of, serving

URL = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_GRAMMAR = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
OBJECT_GRAMMAR = Grammar(kind="json_schema", text='{"type":"object"}')
REGEX_GRAMMAR = Grammar(kind="regex", text="[0-9]+")
EBNF = 'root ::= "yes" | "no"'
EBNF_GRAMMAR = Grammar(kind="ebnf", text=EBNF)


def json_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


SPELLINGS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT_GRAMMAR),
    ({"response_format": json_schema(SCHEMA)}, SCHEMA_GRAMMAR),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA_GRAMMAR),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA_GRAMMAR),
    ({"structured_outputs": {"regex": "[0-9]+"}}, REGEX_GRAMMAR),
    ({"structured_outputs": {"grammar": EBNF}}, EBNF_GRAMMAR),
    ({"structured_outputs": {"json_object": True}}, OBJECT_GRAMMAR),
    (
        {"structured_outputs": {"choice": ["a", 'say "b"']}},
        Grammar(kind="ebnf", text='start: "a" | "say \\"b\\""'),
    ),
    ({"guided_choice": ["a"]}, Grammar(kind="ebnf", text='start: "a"')),
    ({"guided_json": SCHEMA}, SCHEMA_GRAMMAR),
    ({"guided_regex": "[0-9]+"}, REGEX_GRAMMAR),
    ({"guided_grammar": EBNF}, EBNF_GRAMMAR),
    ({"regex": "[0-9]+"}, REGEX_GRAMMAR),
    ({"ebnf": EBNF}, EBNF_GRAMMAR),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
    ({"response_format": json_schema("text")}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({"type": "nonsense"})}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "((a{999}){999}){999}"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice.0"),
    ({"guided_regex": "a", "ebnf": EBNF}, "ebnf"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "grammar"), SPELLINGS, ids=str)
async def test_every_spelling_reaches_the_engine_as_one_grammar(
    fields: dict[str, Any], grammar: Grammar | None
) -> None:
    engine = FakeEngine(TOKENIZER.encode("yes"))
    async with client_of(app_over(engine)) as client:
        answer = await client.post(URL, json={"prompt": "p", **fields})
    assert answer.status_code == 200, answer.text
    assert [request.sampling.grammar for request in engine.requests] == [grammar]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
async def test_what_cannot_be_is_a_400_that_names_the_field(
    fields: dict[str, Any], param: str
) -> None:
    engine = FakeEngine(TOKENIZER.encode("yes"))
    async with client_of(app_over(engine)) as client:
        for stream in (False, True):
            answer = await client.post(URL, json={"prompt": "p", "stream": stream, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
    assert not engine.requests


async def test_the_python_clients_say_and_refuse_the_same() -> None:
    engine = FakeEngine(TOKENIZER.encode("yes"))
    async with serving(engine) as url, HttpClient(url) as client:
        await client.complete("p", response_format=json_schema(SCHEMA))
        assert engine.requests.pop().sampling.grammar == SCHEMA_GRAMMAR
        with pytest.raises(BadRequest, match="guided_regex"):
            await client.complete("p", guided_regex="[")
        assert not engine.requests
    assert build_request([1], grammar=REGEX_GRAMMAR).sampling.grammar == REGEX_GRAMMAR
    for wrong in ("[0-9]+", Grammar(kind="regex", text="a")):
        with pytest.raises(BadRequest, match="grammar"):
            build_request([1], grammar=wrong, ignore_stop=True)


def test_the_order_of_properties_is_the_clients() -> None:
    schema: dict[str, Any] = {"properties": {"z": {}, "a": {}, "m": {}}}
    body = parse_completion(json.dumps({"prompt": "p", "guided_json": schema}).encode())
    demand = body.demand()
    assert demand is not None
    assert list(json.loads(demand.grammar.text)["properties"]) == ["z", "a", "m"]


def test_a_choice_is_its_text_whatever_characters_it_has() -> None:
    choices = [
        'say "hi"',
        "a\\n\nb",
        "\x00\x1f\x7f\t",
        "\u2028\U0001f600",
        "{[(/|",
        " b ",
        "%json {}",
    ]
    body = parse_completion(json.dumps({"prompt": "p", "guided_choice": choices}).encode())
    demand = body.demand()
    assert demand is not None
    compiled = Grammars(MODEL).compile(demand.grammar)
    for text in choices:
        following = compiled.follow()
        following.feed(TOKENIZER.encode(text))
        mask, whole = following.mask()
        assert whole, text
        assert not any(mask)


# ------------------------------------------------------------------ FC-36

FC36: list[tuple[dict[str, Any], int]] = [
    ({"guided_grammar": EBNF}, 200),
    ({"guided_grammar": 'root ::= "a"\nroot ::= "b"'}, 400),
    ({"guided_regex": "^(|.*)$"}, 200),  # a regex like any other: it compiles here and on a rank
    ({"guided_regex": "["}, 400),
    ({"guided_regex": "(?<=a)b"}, 400),
    ({"response_format": json_schema({"type": "nonsense"})}, 400),
    ({"response_format": json_schema({"$ref": "#/nope"})}, 400),
    ({"response_format": {"type": "text"}}, 200),
    ({"response_format": {"type": "json_schema"}}, 400),
    ({"guided_grammar": EBNF}, 200),
]


@pytest.mark.parametrize("cases", [FC36, FC36[::-1]], ids=["in order", "reversed"])
async def test_fc36_the_verdict_is_the_same_whatever_came_before(
    cases: list[tuple[dict[str, Any], int]],
) -> None:
    engine = FakeEngine(TOKENIZER.encode("yes"))
    async with client_of(app_over(engine)) as client:
        for fields, status in cases:
            answer = await client.post(URL, json={"prompt": "p", **fields})
            assert answer.status_code == status, (fields, answer.text)
            if status == 400:
                assert len(answer.json()["error"]["message"]) > len("guided_regex: ")
    assert len(engine.requests) == sum(status == 200 for _, status in cases)


def test_fc36_a_rank_has_the_verdict_of_the_edge() -> None:
    """Every grammar that the edge lets pass compiles for a rank, which has judged others before."""
    rank = Grammars(MODEL)
    for fields, status in (*FC36, *FC36[::-1]):
        try:
            demand = parse_completion(json.dumps({"prompt": "p", **fields}).encode()).demand()
            if demand is not None:
                rank.compile(demand.grammar)
        except BadRequest:
            assert status == 400
        else:
            assert status == 200


async def test_the_openapi_document_has_the_fields() -> None:
    async with client_of(app_over(FakeEngine())) as client:
        document: httpx.Response = await client.get("/openapi.json")
    body = document.json()["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"response_format", "structured_outputs", "guided_json", "regex", "ebnf"} <= set(body)
    assert "ResponseFormat" in document.json()["components"]["schemas"]
