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


def choice_body(
    index: int,
    text: str,
    *,
    finish: str | None,
    logprobs: Json | None,
    token_ids: Sequence[int] | None,
) -> Json:
    """One answer, or what is new of it; `token_ids` are an extension, None if not asked for."""
    choice: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
    if token_ids is not None:
        choice["token_ids"] = list(token_ids)
    return choice


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
        empty = _encode(self._head | {"choices": []})
        self._before = empty.removesuffix("]}").encode()
        self._after = b'],"usage":null}' if null_usage else b"]}"

    def whole(self, choices: list[Json], usage: Usage, more: Mapping[str, Any]) -> Json:
        """`more` are further top-level fields, if not None."""
        return self._around(choices, {"usage": usage.body(), **more})

    def chunk(self, choice: Json) -> bytes:
        """As JSON text."""
        return self._before + _encode(choice).encode() + self._after

    def text_chunk(self, index: int, text: str) -> bytes:
        """The chunk of most tokens: nothing but text, and much cheaper."""
        return b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}%b' % (
            self._before,
            index,
            _encode(text).encode(),
            self._after,
        )

    def last_chunk(self, more: Mapping[str, Any]) -> bytes:
        """The chunk after the last token: usage, timeline, no choices."""
        return _encode(self._around([], more)).encode()

    def _around(self, choices: list[Json], more: Mapping[str, Any]) -> Json:
        present = {key: value for key, value in more.items() if value is not None}
        return self._head | {"choices": choices} | present
