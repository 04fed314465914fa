"""The fields that say what an answer must look like, as OpenAI, vLLM and SGLang spell them.

All of them end as one Grammar. Whether it compiles is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from cluster.errors import BadRequest
from cluster.request import Grammar

MAX_CHOICES = 1024
LONGEST = 1 << 17  # characters of any grammar; cluster/grammar_bounds.py has tighter ones


def _object_or_text(value: object) -> dict[str, Any] | str:
    if not isinstance(value, dict | str) or value == "":
        raise ValueError("must be a JSON schema: an object, or the text of one")
    return value


Text = Annotated[str, Field(min_length=1, max_length=LONGEST)]
Schema = Annotated[
    dict[str, Any] | str,
    PlainValidator(_object_or_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1}]}),
]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]


class BadField(BadRequest):
    """A 400 that knows which field of the body is wrong."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class Demand(NamedTuple):
    field: str  # of the body
    grammar: Grammar


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class JsonSchemaFormat(Body):
    """OpenAI's; `strict` changes nothing, because every schema is followed to the letter."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's, for chat; servers take it for completions too."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's; exactly one of them."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class OutputFormat(Body):
    """Fields of a body; at most one of them may be there."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None

    def demand(self) -> Demand | None:
        """BadField for demands that contradict each other or lack something."""
        given = [name for name in OutputFormat.model_fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise BadField(given[1], f"cannot be together with {given[0]}")
        found = list(self._demands())
        return found[0] if found else None

    def _demands(self) -> Iterator[Demand]:
        if self.response_format is not None:
            yield from _of_format(self.response_format)
        if self.structured_outputs is not None:
            yield _of_structured(self.structured_outputs)
        if self.guided_json is not None:
            yield Demand("guided_json", _schema(self.guided_json))
        if self.guided_choice is not None:
            yield Demand("guided_choice", _choice(self.guided_choice))
        for name, kind in _TEXTS.items():
            if (text := getattr(self, name)) is not None:
                yield Demand(name, _grammar(name, kind, text))


Kind = Literal["regex", "ebnf"]
_TEXTS: dict[str, Kind] = {
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "regex": "regex",
    "ebnf": "ebnf",
}


def _of_format(wanted: ResponseFormat) -> Iterator[Demand]:
    field = "response_format"
    if (wanted.json_schema is None) == (wanted.type == "json_schema"):
        needs = "is needed" if wanted.type == "json_schema" else "is for type json_schema only"
        raise BadField(field, f"json_schema {needs}")
    if wanted.json_schema is not None:
        yield Demand(field, _schema(wanted.json_schema.schema_))
    elif wanted.type == "json_object":
        yield Demand(field, _OBJECT)


def _of_structured(wanted: StructuredOutputs) -> Demand:
    field = "structured_outputs"
    found = [
        *([] if wanted.json_ is None else [_schema(wanted.json_)]),
        *([] if wanted.choice is None else [_choice(wanted.choice)]),
        *([] if wanted.regex is None else [_grammar(field, "regex", wanted.regex)]),
        *([] if wanted.grammar is None else [_grammar(field, "ebnf", wanted.grammar)]),
        *([_OBJECT] if wanted.json_object else []),
    ]
    if len(found) != 1:
        raise BadField(field, f"must have exactly one of {', '.join(_NAMES)}, not {len(found)}")
    return Demand(field, found[0])


_NAMES = ("json", "regex", "choice", "grammar", "json_object")
_OBJECT = Grammar(kind="json_schema", text='{"type":"object"}')


def _schema(wanted: Schema) -> Grammar:
    text = wanted if isinstance(wanted, str) else json.dumps(wanted)
    return _grammar("schema", "json_schema", text)


def _choice(choices: list[str]) -> Grammar:
    """One of the texts, as it stands."""
    texts = " | ".join(map(json.dumps, choices))  # Lark's strings have the escapes of JSON
    return _grammar("choice", "ebnf", f"start: {texts}")


def _grammar(field: str, kind: Literal["regex", "json_schema", "ebnf"], text: str) -> Grammar:
    try:
        return Grammar(kind=kind, text=text)
    except ValueError:
        raise BadField(field, f"must be Unicode, and at most {LONGEST} characters") from None
