"""The OpenAPI document of the server, for tools that read one. Values only.

Bodies are read by hand (it is faster, and a refusal names its field), so what FastAPI would have
found out by itself is told to it here.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from cluster.api.completion_body import CompletionBody

Json = dict[str, Any]

REFERENCE = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class CompletionUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionAnswer(BaseModel):
    """A whole answer; each event of a stream is one too, with what is new."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None
    timeline: dict[str, Any] | None = None


def _refusals(**reasons: str) -> dict[int | str, Json]:
    return {
        int(name.removeprefix("s")): {"model": ErrorAnswer, "description": reason}
        for name, reason in reasons.items()
    }


READY: dict[int | str, Json] = _refusals(s503="No live prefill or no live decode rank")

COMPLETIONS: Json = {
    "response_model": CompletionAnswer,
    "responses": {
        200: {
            "description": "The answer, or a stream of events if `stream` is true",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        **_refusals(
            s400="A field is unknown, ill-typed or out of range; or the prompt is too long",
            s401="The API key is missing or wrong",
            s404="The model is not served here",
            s408="The body did not come in time",
            s413="The body is too large",
            s415="The body says that it is no JSON",
            s429="As much is running as the server takes; Retry-After says when to come again",
            s502="A worker was lost more often than it is tried again",
            s503="No live worker; Retry-After says when to come again",
        ),
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": REFERENCE.format(model=CompletionBody.__name__)}
                }
            },
        }
    },
}


def document(app: FastAPI) -> Json:
    """Made once an app."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        body = CompletionBody.model_json_schema(ref_template=REFERENCE)
        schemas = made["components"]["schemas"]
        schemas |= body.pop("$defs", {}) | {CompletionBody.__name__: body}
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = made
    return app.openapi_schema
