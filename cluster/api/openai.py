"""OpenAI's shapes of what goes out: completions, chunks of them, the model list, errors.

Values only; nothing is sent from here. A chunk is written as JSON text around one choice, since
all that changes from token to token is that choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import BadRequest, ClusterError

Json = dict[str, Any]

CODES = {
    "PromptTooLong": "context_length_exceeded",
    "Unauthorized": "invalid_api_key",
    "UnknownModel": "model_not_found",
    "NoRoom": "rate_limit_exceeded",
}
"""OpenAI's word for one of our kinds, where it has one; clients tell errors apart by it."""

_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: dumps() makes one a call
_quote = json.encoder.encode_basestring_ascii  # what it does with a string
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class UnknownModel(BadRequest):
    status = 404
    param = "model"


def error_body(error: ClusterError) -> Json:
    """OpenAI's error shape; `param` is the field at fault where there is one."""
    wrong = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(error.status, wrong),
            "param": getattr(error, "param", None),
            "code": CODES.get(error.kind, error.kind),
        }
    }


def model_list(name: str, created: int, max_length: int) -> Json:
    """`max_length` tokens are the longest prompt and answer together."""
    entry = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tandem",
        "max_model_len": max_length,
    }
    return {"object": "list", "data": [entry]}


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def body(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def choice_text(
    index: int,
    text: str,
    *,
    finish: str | None = None,
    logprobs: str = "null",
    token_ids: Sequence[str] | None = None,
) -> str:
    """One answer, or what is new of it, as JSON text; `logprobs` are JSON text themselves.

    `token_ids` are an extension, None if not asked for. Written by hand, because it is made for
    each token: a third of the time of an encoder.
    """
    ids = "" if token_ids is None else f',"token_ids":[{",".join(token_ids)}]'
    reason = "null" if finish is None else f'"{finish}"'
    return (
        f'{{"index":{index},"text":{_quote(text)},"logprobs":{logprobs},'
        f'"finish_reason":{reason}{ids}}}'
    )


class Completion:
    """What all bodies of one answer share."""

    def __init__(self, completion_id: str, created: int, model: str, *, null_usage: bool) -> None:
        """`created` in seconds since 1970; `null_usage`: chunks say that usage is yet to come."""
        self._head: Json = {
            "id": completion_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._before = _encode(self._head | {"choices": []}).removesuffix("]}")
        self._after = '],"usage":null}' if null_usage else "]}"

    def whole(self, choices: Sequence[str], usage: Usage, timeline: Json | None) -> bytes:
        """JSON text; so are the `choices`."""
        more = {"usage": usage.body()} | ({} if timeline is None else {"timeline": timeline})
        return f"{self._before}{','.join(choices)}],{_encode(more)[1:]}".encode()

    def chunk(self, choice: str) -> bytes:
        """JSON text around that of one choice."""
        return f"{self._before}{choice}{self._after}".encode()

    def last_chunk(self, more: Mapping[str, Any]) -> bytes:
        """The chunk after the last token: usage, timeline where they are not None, no choices."""
        present = {key: value for key, value in more.items() if value is not None}
        return _encode(self._head | {"choices": []} | present).encode()
