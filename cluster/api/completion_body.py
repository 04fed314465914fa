"""What POST /v1/completions takes: OpenAI's fields and our extensions, checked one by one.

A null field is an absent field; an unknown one is refused by name, because a sampling option that
is quietly ignored gives wrong answers. Values only: no tokenizer, no engine.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    field_validator,
)

from cluster.api.json_body import parse_json
from cluster.api.output_format import BadField, Body, OutputFormat
from cluster.errors import BadRequest

MAX_STOP_STRINGS = 1024
MAX_STOP_CHARACTERS = 16384  # of all stop strings together; their automaton has a node for each
MAX_BAD_WORDS = 512
MAX_PROMPTS = 1024  # counted before any is looked at: a body must not occupy the loop
MAX_STOP_IDS = 1024
MAX_ALLOWED_IDS = 1 << 18  # more than any vocabulary
MAX_BIASES = 4096
MAX_IMAGES = 1024  # the configuration has the real one
Prompts = tuple[str | list[int], ...]


def _prompts(value: object) -> Prompts:
    """A text, its token ids, or a list of either."""
    if isinstance(value, list) and len(value) > MAX_PROMPTS and isinstance(value[0], str | list):
        raise ValueError(f"may be up to {MAX_PROMPTS} prompts, not {len(value)}")
    if isinstance(value, list) and value and all(isinstance(one, str | list) for one in value):
        prompts: Prompts = tuple(value)
    else:
        prompts = (value,)  # type: ignore[assignment]  # looked at below
    for one in prompts:
        ids = isinstance(one, list) and all(type(token_id) is int for token_id in one)
        if not isinstance(one, str) and not ids:
            raise ValueError("must be a string, a list of token ids, or a list of either")
        if isinstance(one, str) and not _is_unicode(one):
            raise ValueError("has half of a surrogate pair, which is no character")
    return prompts


def _stop_strings(value: object) -> tuple[str, ...]:
    """One string or a list of them."""
    several = value if isinstance(value, list) else [value]
    strings = tuple(one for one in several if isinstance(one, str))
    if len(strings) < len(several):
        raise ValueError("must be a string or a list of strings")
    if not all(strings):
        raise ValueError("must not have an empty string: every text contains it")
    characters = sum(map(len, strings))
    if len(strings) > MAX_STOP_STRINGS or characters > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"may have {MAX_STOP_STRINGS} strings and {MAX_STOP_CHARACTERS} characters, not "
            f"{len(strings)} and {characters}"
        )
    return strings


def _not_too_many_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"may have up to {MAX_BIASES} token ids, not {len(value)}")
    return value


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        },
    ]
}
_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "maxItems": MAX_STOP_STRINGS,
        },
    ]
}


class StreamOptions(Body):
    include_usage: bool = False


Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Field(ge=0)]


class CompletionBody(OutputFormat):
    """A completion request. Ranges are those of cluster.request.Sampling."""

    # OpenAI's
    model: str | None = None
    prompt: Annotated[Prompts, PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int = Field(default=16, ge=1, lt=2**31)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    n: int = Field(default=1, ge=1, le=128)
    stop: Annotated[
        tuple[str, ...], PlainValidator(_stop_strings), WithJsonSchema(_STOP_SCHEMA)
    ] = ()
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]],
        BeforeValidator(_not_too_many_biases),
    ] = Field(default={})
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    best_of: int | None = None
    suffix: str | None = None
    user: str | None = None
    # as other servers spell them
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0)
    min_tokens: int = Field(default=0, ge=0, lt=2**31)
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field(default=[], max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool = False
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default=[], max_length=MAX_BAD_WORDS
    )
    allowed_token_ids: list[TokenId] | None = Field(
        default=None, min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True
    )
    return_token_ids: bool = False
    # our own
    images: list[str] = Field(
        default=[], max_length=MAX_IMAGES, description="data:image/png;base64,... of each"
    )
    timeline: bool = False
    colocated: bool = False

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, suffix: str | None) -> str | None:
        if suffix is not None:
            raise ValueError("is not supported: the model only continues a prompt")
        return suffix

    @field_validator("bad_words")
    @classmethod
    def _are_characters(cls, words: list[str]) -> list[str]:
        if not all(map(_is_unicode, words)):
            raise ValueError("has half of a surrogate pair, which is no character")
        return words

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check_together(self) -> None:
        """BadField for values that are right alone and cannot be together."""
        choices = len(self.prompt) * self.n
        if self.images and not (len(self.prompt) == 1 and isinstance(self.prompt[0], list)):
            raise BadField("images", "are for one prompt of token ids, with an image token each")
        if self.best_of not in (None, self.n):
            raise BadField("best_of", f"must be n ({self.n}): answers are not ranked here")
        if self.stream_options is not None and not self.stream:
            raise BadField("stream_options", "is for streams only; set stream to true")
        if self.ignore_eos and self.stop_token_ids:
            raise BadField("ignore_eos", "ignores every stop token, so stop_token_ids too")
        if self.timeline and choices > 1:
            raise BadField("timeline", f"is for one answer at a time, not for {choices}")
        if self.demand() is not None and self.ignore_eos:
            raise BadField("ignore_eos", "would keep the answer from ending where it is complete")


def parse_completion(raw: bytes) -> CompletionBody:
    """BadRequest for what is not JSON, BadField for a field that is unknown, ill-typed or out of
    range; the first one found."""
    tree = parse_json(raw)
    if not isinstance(tree, dict):
        raise BadRequest("the body must be a JSON object")
    for key in tree:
        if key not in CompletionBody.model_fields:
            raise BadField(_shown(key), "is not a field that this server knows")
    try:
        body = CompletionBody.model_validate({k: v for k, v in tree.items() if v is not None})
    except ValidationError as error:
        raise bad_field(error) from error
    body.check_together()
    return body


def bad_field(error: ValidationError) -> BadField:
    """The first of pydantic's complaints, as an answer."""
    first: dict[str, Any] = dict(error.errors(include_url=False, include_input=False)[0])
    message = {
        "extra_forbidden": "is not a field that this server knows",
        "missing": "is required",
    }.get(first["type"], first["msg"].removeprefix("Value error, "))
    return BadField(".".join(str(part) for part in first["loc"]) or "body", message)


def _shown(key: str) -> str:
    return key if len(key) <= 64 else f"{key[:64]}..."


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
